//! One work item: the tokens of a range against all query heads of a KV head's group.
//!
//! Tokens go in blocks. Each K and V row is read from memory once for the whole group: query heads beyond the first tile find
//! it in the nearest cache. Where the tokens of a head lie apart, as in NHD pools, an item has a few neighbouring KV heads
//! and takes each block of tokens for one after the other, so that memory is read in longer runs.

use std::ops::Range;

use super::merge::Partials;
use super::tile::{TileState, tile_over_block};
use crate::attention::element::{ElementType, VectorElement};
use crate::attention::launch::{Launch, MAX_GROUP};
use crate::attention::output::write_output;
use crate::attention::rows::{Block, Cursor, MAX_BLOCK_TOKENS};
use crate::attention::scratch::Scratch;
use crate::attention::simd::{Kernel, Simd};

/// Most KV heads of an item.
pub(crate) const MAX_ITEM_HEADS: usize = 4;
/// Query heads of a register tile.
const TILE_HEADS: usize = 4;
const MAX_TILES: usize = MAX_GROUP.div_ceil(TILE_HEADS);
/// K and V of a block, and as much again that is on its way, stay in the first-level cache.
const BLOCK_BYTES: usize = 16 * 1024;

/// A range of tokens of one row, for one KV head or a few neighbours.
pub(crate) struct Item<'a> {
    pub launch: &'a Launch,
    pub scratch: &'a mut Scratch,
    /// Query row.
    pub row: usize,
    /// At most [`MAX_ITEM_HEADS`].
    pub kv_heads: Range<usize>,
    /// Page ids of the row, each below the pool's number of pages.
    pub pages: &'a [i32],
    /// Token range, counted from the first token of the first page; inside the pages.
    pub begin: usize,
    pub end: usize,
    pub destination: Destination,
    pub partials: Partials,
}

/// Where an item's result goes.
#[derive(Clone, Copy)]
pub(crate) enum Destination {
    /// The row's output: the item is all of the row.
    Output,
    /// A partial of the workspace.
    Partial(usize),
}

impl Kernel for Item<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.launch.k.element {
            ElementType::F32 => self.over::<S, f32>(s),
            ElementType::F16 => self.over::<S, half::f16>(s),
            ElementType::Bf16 => self.over::<S, half::bf16>(s),
        }
    }
}

impl Item<'_> {
    #[inline(always)]
    fn over<S: Simd, T: VectorElement>(self, s: S) {
        let Self { launch, scratch, row, kv_heads, pages, begin, end, destination, partials } = self;
        let (dim, group) = (launch.head_dim, launch.group_size);
        let first_qo_head = kv_heads.start * group;
        let num_heads = kv_heads.len().min(MAX_ITEM_HEADS);
        let num_floats = num_heads * group * dim;
        let floats = scratch.floats(2 * num_floats + MAX_BLOCK_TOKENS * TILE_HEADS);
        let (queries, rest) = floats.split_at_mut(num_floats);
        let (accumulators, rest) = rest.split_at_mut(num_floats);
        let weights = rest.as_mut_ptr();
        accumulators.fill(0.0);
        for (head, query) in queries.chunks_exact_mut(dim).enumerate() {
            // SAFETY: row and head are inside q.
            unsafe { launch.load_query(s, row, first_qo_head + head, query) };
        }

        let num_tiles = group.div_ceil(TILE_HEADS);
        // Even tiles: 5 heads are 3 + 2, not 4 + 1.
        let first_head = |tile: usize| tile * group / num_tiles;
        let mut tiles = [[TileState::empty(s); MAX_TILES]; MAX_ITEM_HEADS];

        let pools = (launch.k, launch.v);
        let block_tokens = (BLOCK_BYTES / (2 * launch.k.row_bytes())).clamp(16, MAX_BLOCK_TOKENS) & !15;
        // The same tokens of one head after the other: all heads have as many blocks.
        let mut cursors = [0, 1, 2, 3].map(|i| Cursor::new(pools, kv_heads.start + i, pages, begin, end));
        let (mut block, mut next) = (Block::<T>::new(), Block::<T>::new());
        let mut kv_head = 0;
        // SAFETY: the item's pages and range are inside the pool.
        unsafe { cursors[0].fill(&mut block, block_tokens) };
        while block.len > 0 {
            let next_head = if kv_head + 1 == num_heads { 0 } else { kv_head + 1 };
            // SAFETY: as above.
            unsafe { cursors[next_head].fill(&mut next, block_tokens) };
            for (tile, state) in tiles[kv_head].iter_mut().enumerate().take(num_tiles) {
                let (head, tile_end) = (first_head(tile), first_head(tile + 1));
                let ahead = (tile == 0 && next.len > 0).then_some(&next);
                let cap = launch.softmax.cap;
                let offset = (kv_head * group + head) * dim;
                // SAFETY: the rows of the block are readable, queries and accumulators hold the rows of all heads.
                unsafe {
                    let (q, acc) = (queries.as_ptr().add(offset), accumulators.as_mut_ptr().add(offset));
                    match tile_end - head {
                        1 => tile_over_block::<S, T, 1>(s, q, acc, weights, dim, &block, ahead, cap, state),
                        2 => tile_over_block::<S, T, 2>(s, q, acc, weights, dim, &block, ahead, cap, state),
                        3 => tile_over_block::<S, T, 3>(s, q, acc, weights, dim, &block, ahead, cap, state),
                        _ => tile_over_block::<S, T, 4>(s, q, acc, weights, dim, &block, ahead, cap, state),
                    }
                }
            }
            std::mem::swap(&mut block, &mut next);
            kv_head = next_head;
        }

        for (head, values) in accumulators.chunks_exact(dim).enumerate() {
            let (kv_head, head_of_group) = (head / group, head % group);
            let tile = (0..num_tiles).rfind(|tile| first_head(*tile) <= head_of_group).unwrap_or(0);
            let (begin, end) = (first_head(tile), first_head(tile + 1));
            let state = match end - begin {
                1 => tiles[kv_head][tile].of_head::<1>(s, head_of_group - begin),
                2 => tiles[kv_head][tile].of_head::<2>(s, head_of_group - begin),
                _ => tiles[kv_head][tile].of_head::<4>(s, head_of_group - begin),
            };
            // SAFETY: row and head are inside the launch, and no other item has both this head and destination.
            unsafe {
                match destination {
                    Destination::Output => write_output(s, launch, row, first_qo_head + head, state, values),
                    Destination::Partial(partial) => {
                        partials.write(partial, first_qo_head + head, state, values)
                    }
                }
            }
        }
    }
}

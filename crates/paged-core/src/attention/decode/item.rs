//! One work item and KV head: the tokens of a range against all query heads of the group.
//!
//! Tokens go in blocks. A block's logits are made in square register tiles (heads x tokens) that one transposed sum turns
//! into a vector of logits, so that no logit costs a horizontal sum of its own; the values are then accumulated in
//! registers over a part of the head dimension at a time. Each K and V row is read from memory once for the whole group:
//! heads beyond the first tile find it in the nearest cache.

use super::merge::Partials;
use crate::attention::element::{ElementType, VectorElement};
use crate::attention::launch::{Launch, MAX_GROUP};
use crate::attention::math::{exp2, tanh};
use crate::attention::output::write_output;
use crate::attention::rows::{Block, Cursor, MAX_BLOCK_TOKENS};
use crate::attention::scratch::Scratch;
use crate::attention::simd::{Kernel, MAX_LANES, Simd, group_max, group_sum};
use crate::attention::state::State;

/// Query heads of a register tile.
const TILE_HEADS: usize = 4;
const MAX_TILES: usize = MAX_GROUP.div_ceil(TILE_HEADS);
/// K and V of a block, and as much again that is on its way, stay in the first-level cache.
const BLOCK_BYTES: usize = 16 * 1024;

/// A range of tokens of one row, for one KV head.
pub(crate) struct Item<'a> {
    pub launch: &'a Launch,
    pub scratch: &'a mut Scratch,
    /// Query row.
    pub row: usize,
    pub kv_head: usize,
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

/// Softmax state of a register tile: lane `head * tokens + token`, uniform over a head's lanes for the maximum.
#[derive(Clone, Copy)]
struct TileState<S: Simd> {
    max: S::V,
    sum: S::V,
}

impl Item<'_> {
    #[inline(always)]
    fn over<S: Simd, T: VectorElement>(self, s: S) {
        let Self { launch, scratch, row, kv_head, pages, begin, end, destination, partials } = self;
        let (dim, group) = (launch.head_dim, launch.group_size);
        let floats = scratch.floats(2 * group * dim + MAX_BLOCK_TOKENS * TILE_HEADS);
        let (queries, rest) = floats.split_at_mut(group * dim);
        let (accumulators, rest) = rest.split_at_mut(group * dim);
        let weights = rest.as_mut_ptr();
        accumulators.fill(0.0);
        for (g, query) in queries.chunks_exact_mut(dim).enumerate() {
            // SAFETY: row and head are inside q.
            unsafe { launch.load_query(s, row, kv_head * group + g, query) };
        }

        let num_tiles = group.div_ceil(TILE_HEADS);
        // Even tiles: 5 heads are 3 + 2, not 4 + 1.
        let first_head = |tile: usize| tile * group / num_tiles;
        let empty = TileState { max: s.splat(f32::NEG_INFINITY), sum: s.splat(0.0) };
        let mut tiles = [empty; MAX_TILES];

        let block_tokens = (BLOCK_BYTES / (2 * launch.k.row_bytes())).clamp(16, MAX_BLOCK_TOKENS) & !15;
        let mut cursor = Cursor::new((launch.k, launch.v), kv_head, pages, begin, end);
        let (mut block, mut next) = (Block::<T>::new(), Block::<T>::new());
        // SAFETY: the item's pages and range are inside the pool.
        unsafe { cursor.fill(&mut block, block_tokens) };
        while block.len > 0 {
            // SAFETY: as above.
            unsafe { cursor.fill(&mut next, block_tokens) };
            for (tile, state) in tiles.iter_mut().enumerate().take(num_tiles) {
                let head = first_head(tile);
                let ahead = (tile == 0 && next.len > 0).then_some(&next);
                let cap = launch.softmax.cap;
                // SAFETY: the rows of the block are readable, queries and accumulators hold `group` rows.
                unsafe {
                    let q = queries.as_ptr().add(head * dim);
                    let acc = accumulators.as_mut_ptr().add(head * dim);
                    match first_head(tile + 1) - head {
                        1 => tile_over_block::<S, T, 1>(s, q, acc, weights, dim, &block, ahead, cap, state),
                        2 => tile_over_block::<S, T, 2>(s, q, acc, weights, dim, &block, ahead, cap, state),
                        3 => tile_over_block::<S, T, 3>(s, q, acc, weights, dim, &block, ahead, cap, state),
                        _ => tile_over_block::<S, T, 4>(s, q, acc, weights, dim, &block, ahead, cap, state),
                    }
                }
            }
            std::mem::swap(&mut block, &mut next);
        }

        for (tile, state) in tiles.iter().enumerate().take(num_tiles) {
            let (head, end) = (first_head(tile), first_head(tile + 1));
            let (mut max, mut sum) = ([0.0; MAX_LANES], [0.0; MAX_LANES]);
            let tokens = match end - head {
                1 => lanes_of::<S, 1>(s, state, &mut max, &mut sum),
                2 => lanes_of::<S, 2>(s, state, &mut max, &mut sum),
                _ => lanes_of::<S, 4>(s, state, &mut max, &mut sum),
            };
            for h in head..end {
                let lane = (h - head) * tokens;
                let state = State { max: max[lane], sum: sum[lane] };
                let values = &accumulators[h * dim..][..dim];
                let qo_head = kv_head * group + h;
                // SAFETY: row and head are inside the launch, and no other item has both this head and destination.
                unsafe {
                    match destination {
                        Destination::Output => write_output(s, launch, row, qo_head, state, values),
                        Destination::Partial(partial) => partials.write(partial, qo_head, state, values),
                    }
                }
            }
        }
    }
}

/// Tokens of a register tile of `heads` heads.
const fn tile_tokens(lanes: usize, heads: usize) -> usize {
    lanes / heads.next_power_of_two()
}

#[inline(always)]
fn lanes_of<S: Simd, const H: usize>(
    s: S,
    state: &TileState<S>,
    max: &mut [f32; MAX_LANES],
    sum: &mut [f32; MAX_LANES],
) -> usize {
    let tokens = tile_tokens(S::LANES, H);
    let total = match tokens {
        2 => group_sum::<S, 2>(s, state.sum),
        4 => group_sum::<S, 4>(s, state.sum),
        8 => group_sum::<S, 8>(s, state.sum),
        _ => group_sum::<S, 16>(s, state.sum),
    };
    // SAFETY: no backend has more than MAX_LANES lanes.
    unsafe {
        s.store_f32(max.as_mut_ptr(), state.max);
        s.store_f32(sum.as_mut_ptr(), total);
    }
    tokens
}

/// Takes a block of tokens into the states and accumulators of `H` query heads.
///
/// # Safety
/// `q` and `acc` point to `H` rows of `dim` values, `weights` to `MAX_BLOCK_TOKENS * H.next_power_of_two()` values, and
/// the rows of `block` are readable.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "inlined into its one caller")]
unsafe fn tile_over_block<S: Simd, T: VectorElement, const H: usize>(
    s: S,
    q: *const f32,
    acc: *mut f32,
    weights: *mut f32,
    dim: usize,
    block: &Block<T>,
    ahead: Option<&Block<T>>,
    cap: Option<f32>,
    state: &mut TileState<S>,
) {
    let tokens = tile_tokens(S::LANES, H);
    let mut token_of_lane = [0.0; MAX_LANES];
    for (lane, token) in token_of_lane.iter_mut().enumerate() {
        *token = (lane % tokens) as f32;
    }
    // SAFETY: the caller's promise; the block pads its rows to whole tiles.
    unsafe {
        let token_of_lane = s.load_f32(token_of_lane.as_ptr());
        let mut max = state.max;
        let (mut first, mut w) = (0, weights);
        while first < block.len {
            let ahead = ahead.map(|next| next.k.as_ptr().add(first));
            let mut logits = tile_logits::<S, T, H>(s, q, dim, block.k.as_ptr().add(first), ahead);
            if let Some(cap) = cap {
                logits = s.mul(tanh(s, logits), s.splat(cap));
            }
            if first + tokens > block.len {
                let visible = s.splat((block.len - first) as f32);
                logits = s.select_lt(token_of_lane, visible, logits, s.splat(f32::NEG_INFINITY));
            }
            s.store_f32(w, logits);
            max = s.max(logits, max);
            first += tokens;
            w = w.add(S::LANES);
        }
        max = match tokens {
            2 => group_max::<S, 2>(s, max),
            4 => group_max::<S, 4>(s, max),
            8 => group_max::<S, 8>(s, max),
            _ => group_max::<S, 16>(s, max),
        };
        // -inf - -inf is NaN: subtract 0 while nothing finite was seen.
        let base = s.select_lt(s.splat(f32::NEG_INFINITY), max, max, s.splat(0.0));
        let decay = exp2(s, s.sub(state.max, base));
        let mut sum = s.mul(state.sum, decay);
        let (mut first, mut w) = (0, weights);
        while first < block.len {
            let weight = exp2(s, s.sub(s.load_f32(w), base));
            s.store_f32(w, weight);
            sum = s.add(sum, weight);
            first += tokens;
            w = w.add(S::LANES);
        }
        *state = TileState { max, sum };
        let mut decays = [0.0; MAX_LANES];
        s.store_f32(decays.as_mut_ptr(), decay);
        let mut decay = [s.splat(0.0); H];
        for h in 0..H {
            decay[h] = s.splat(decays[h * tokens]);
        }

        // As many accumulators as registers allow: half of them, or a third of 16.
        let widest = if S::LANES == 16 { 16 / H } else { 8 / H };
        let mut i = 0;
        while widest >= 8 && i + 8 * S::LANES <= dim {
            accumulate::<S, T, H, 8>(s, acc.add(i), dim, &decay, weights, block, i, ahead);
            i += 8 * S::LANES;
        }
        while widest >= 4 && i + 4 * S::LANES <= dim {
            accumulate::<S, T, H, 4>(s, acc.add(i), dim, &decay, weights, block, i, ahead);
            i += 4 * S::LANES;
        }
        while i + 2 * S::LANES <= dim {
            accumulate::<S, T, H, 2>(s, acc.add(i), dim, &decay, weights, block, i, ahead);
            i += 2 * S::LANES;
        }
        while i < dim {
            accumulate::<S, T, H, 1>(s, acc.add(i), dim, &decay, weights, block, i, ahead);
            i += S::LANES;
        }
    }
}

/// True where a row's element `i` starts a cache line, counted from the row's start: prefetches are spread over the
/// arithmetic, one per line, as a burst of them fills the miss buffers and stalls everything behind it.
#[inline(always)]
const fn starts_line<T>(i: usize) -> bool {
    const CACHE_LINE_BYTES: usize = 64;
    (i * size_of::<T>()).is_multiple_of(CACHE_LINE_BYTES)
}

/// Dot products of `H` queries with the K rows of one tile; lane `head * tokens + token`.
///
/// # Safety
/// `q` points to `H` rows of `dim` values, `rows` to a tile's rows of `dim` elements, `ahead` to as many addresses.
#[inline(always)]
unsafe fn tile_logits<S: Simd, T: VectorElement, const H: usize>(
    s: S,
    q: *const f32,
    dim: usize,
    rows: *const *const T,
    ahead: Option<*const *const T>,
) -> S::V {
    let tokens = tile_tokens(S::LANES, H);
    let mut sums = [s.splat(0.0); MAX_LANES];
    let mut i = 0;
    while i < dim {
        // SAFETY: the caller's promise.
        unsafe {
            let mut queries = [s.splat(0.0); H];
            for h in 0..H {
                queries[h] = s.load_f32(q.add(h * dim + i));
            }
            for t in 0..tokens {
                if let Some(ahead) = ahead
                    && starts_line::<T>(i)
                {
                    s.prefetch((*ahead.add(t)).wrapping_add(i).cast());
                }
                let k = T::load(s, (*rows.add(t)).add(i));
                for h in 0..H {
                    sums[h * tokens + t] = s.fma(k, queries[h], sums[h * tokens + t]);
                }
            }
        }
        i += S::LANES;
    }
    s.sum_rows(&sums)
}

/// `acc = acc * decay + weights * V` over `N` vectors of the head dimension from element `from` on.
///
/// # Safety
/// `acc` points to `H` rows, `dim` apart, of `N` vectors; the rows of `block` are readable and its weights were made.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "inlined into its one caller")]
unsafe fn accumulate<S: Simd, T: VectorElement, const H: usize, const N: usize>(
    s: S,
    acc: *mut f32,
    dim: usize,
    decay: &[S::V; H],
    weights: *const f32,
    block: &Block<T>,
    from: usize,
    ahead: Option<&Block<T>>,
) {
    let tokens = tile_tokens(S::LANES, H);
    // SAFETY: the caller's promise.
    unsafe {
        let mut out = [[s.splat(0.0); N]; H];
        for h in 0..H {
            for n in 0..N {
                out[h][n] = s.mul(s.load_f32(acc.add(h * dim + n * S::LANES)), decay[h]);
            }
        }
        let (mut first, mut w) = (0, weights);
        while first < block.len {
            let last = (first + tokens).min(block.len);
            for (t, row) in block.v[first..last].iter().enumerate() {
                let mut weight = [s.splat(0.0); H];
                for h in 0..H {
                    weight[h] = s.splat(*w.add(h * tokens + t));
                }
                for n in 0..N {
                    let at = from + n * S::LANES;
                    if let Some(ahead) = ahead
                        && starts_line::<T>(at)
                    {
                        s.prefetch(ahead.v[first + t].wrapping_add(at).cast());
                    }
                    let v = T::load(s, row.add(at));
                    for h in 0..H {
                        out[h][n] = s.fma(v, weight[h], out[h][n]);
                    }
                }
            }
            first += tokens;
            w = w.add(S::LANES);
        }
        for h in 0..H {
            for n in 0..N {
                s.store_f32(acc.add(h * dim + n * S::LANES), out[h][n]);
            }
        }
    }
}

//! One tile of queries of one KV head against all the keys that it sees.

use super::gemm::{MICRO_ROWS, Matrix, gemm};
use super::softmax::softmax_row;
use crate::attention::element::{ElementType, VectorElement};
use crate::attention::launch::Launch;
use crate::attention::output::write_output;
use crate::attention::rows::{Block, Cursor, MAX_BLOCK_TOKENS};
use crate::attention::scratch::Scratch;
use crate::attention::sequence::PagedSequence;
use crate::attention::simd::{Kernel, MAX_LANES, Simd};
use crate::attention::state::State;

/// Keys of a tile.
const TILE_KEYS: usize = MAX_BLOCK_TOKENS;

/// Queries `begin..end` of the launch for one KV head.
pub(crate) struct QueryTile<'a> {
    pub launch: &'a Launch,
    pub scratch: &'a mut Scratch,
    pub sequence: PagedSequence<'a>,
    pub kv_head: usize,
    /// Token of the sequence that is query 0.
    pub first_query: usize,
    pub begin: usize,
    pub end: usize,
}

impl Kernel for QueryTile<'_> {
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

/// Working memory of a tile, carved out of a thread's scratch. Row `token * group_size + head` is one query.
struct Buffers {
    /// `[num_rows, head_dim]`, scaled.
    queries: Matrix,
    /// `[num_rows, head_dim]`
    accumulators: Matrix,
    /// `[num_rows, TILE_KEYS]`: logits, then weights.
    scores: Matrix,
    /// `[head_dim, TILE_KEYS]`
    keys_transposed: Matrix,
    /// `[TILE_KEYS, head_dim]`
    values: Matrix,
    /// `[num_rows]`: what a tile of keys does to what was accumulated before.
    decays: *mut f32,
    /// `[num_rows]`
    states: *mut State,
}

impl Buffers {
    fn carve(scratch: &mut Scratch, num_rows: usize, dim: usize) -> Self {
        let row_floats = num_rows * dim;
        let tile_floats = TILE_KEYS * dim;
        let score_floats = num_rows * TILE_KEYS;
        let floats = scratch.floats(2 * row_floats + 2 * tile_floats + score_floats + 3 * num_rows);
        floats[..2 * row_floats].fill(0.0);
        let mut rest = floats.as_mut_ptr();
        let mut take = |len: usize| {
            let part = rest;
            rest = rest.wrapping_add(len);
            part
        };
        Self {
            queries: Matrix { data: take(row_floats), stride: dim },
            accumulators: Matrix { data: take(row_floats), stride: dim },
            scores: Matrix { data: take(score_floats), stride: TILE_KEYS },
            keys_transposed: Matrix { data: take(tile_floats), stride: TILE_KEYS },
            values: Matrix { data: take(tile_floats), stride: dim },
            decays: take(num_rows),
            states: take(2 * num_rows).cast(),
        }
    }
}

impl QueryTile<'_> {
    #[inline(always)]
    fn over<S: Simd, T: VectorElement>(self, s: S) {
        let Self { launch, scratch, sequence, kv_head, first_query, begin, end } = self;
        let (dim, group) = (launch.head_dim, launch.group_size);
        let num_queries = (end - begin) * group;
        let num_rows = num_queries.next_multiple_of(MICRO_ROWS);
        let buffers = Buffers::carve(scratch, num_rows, dim);
        let window = launch.softmax.window;
        // SAFETY: all rows are inside the launch and the buffers, all tokens inside the checked sequence.
        unsafe {
            for row in 0..num_queries {
                let query = std::slice::from_raw_parts_mut(buffers.queries.data.add(row * dim), dim);
                launch.load_query(s, begin + row / group, kv_head * group + row % group, query);
            }
            for row in 0..num_rows {
                buffers.states.add(row).write(State::EMPTY);
            }
            // Tokens up to and including the last query's own, from the first that the first query sees.
            let last_key = first_query + end;
            let mut first_key = (first_query + begin + 1).saturating_sub(window);
            let offset = sequence.first_page_offset;
            let pools = (launch.k, launch.v);
            let mut cursor =
                Cursor::new(pools, kv_head, sequence.page_ids, offset + first_key, offset + last_key);
            let mut block = Block::<T>::new();
            cursor.fill(&mut block, TILE_KEYS);
            while block.len > 0 {
                let num_keys = block.len;
                let num_columns = num_keys.next_multiple_of(S::LANES);
                pack_keys(s, &block, dim, num_columns, buffers.keys_transposed);
                let is_finite = pack_values(s, &block, dim, buffers.values);
                let shape = (num_rows, num_columns, dim);
                gemm(s, shape, buffers.queries, buffers.keys_transposed, buffers.scores, None);
                let visible = |row: usize| {
                    let seen = first_query + begin + row / group + 1;
                    let last = seen.saturating_sub(first_key).min(num_keys);
                    seen.saturating_sub(window).saturating_sub(first_key).min(last)..last
                };
                let mut is_seen_by_all = true;
                for row in 0..num_queries {
                    let visible = visible(row);
                    is_seen_by_all &= visible == (0..num_keys);
                    let scores = buffers.scores.data.add(row * TILE_KEYS);
                    let state = &mut *buffers.states.add(row);
                    *buffers.decays.add(row) =
                        softmax_row(s, scores, num_columns, visible, launch.softmax.cap, state);
                }
                for row in num_queries..num_rows {
                    *buffers.decays.add(row) = 0.0;
                }
                if is_finite || is_seen_by_all {
                    let shape = (num_rows, dim, num_keys);
                    let decays = Some(buffers.decays.cast_const());
                    gemm(s, shape, buffers.scores, buffers.values, buffers.accumulators, decays);
                } else {
                    // 0 * NaN is NaN: values that a query does not see must not meet its weights.
                    for row in 0..num_queries {
                        accumulate_row(s, &buffers, dim, row, visible(row));
                    }
                }
                first_key += num_keys;
                cursor.fill(&mut block, TILE_KEYS);
            }
            for row in 0..num_queries {
                let accumulator = std::slice::from_raw_parts(buffers.accumulators.data.add(row * dim), dim);
                let (token, head) = (begin + row / group, kv_head * group + row % group);
                write_output(s, launch, token, head, *buffers.states.add(row), accumulator);
            }
        }
    }
}

/// Transposes K rows to `[head_dim, num_columns]`, columns beyond the block 0.
///
/// # Safety
/// The block's rows are readable; `to` has the room.
#[inline(always)]
unsafe fn pack_keys<S: Simd, T: VectorElement>(
    s: S,
    block: &Block<T>,
    dim: usize,
    num_columns: usize,
    to: Matrix,
) {
    let mut column = 0;
    while column < num_columns {
        let num_rows = (block.len - column).min(S::LANES);
        let mut i = 0;
        while i < dim {
            // SAFETY: the caller's promise.
            unsafe {
                let mut square = [s.splat(0.0); MAX_LANES];
                for (lane, row) in square.iter_mut().enumerate().take(num_rows) {
                    *row = T::load(s, block.k[column + lane].add(i));
                }
                s.transpose(&mut square);
                for (lane, row) in square.iter().enumerate().take(S::LANES) {
                    s.store_f32(to.data.add((i + lane) * to.stride + column), *row);
                }
            }
            i += S::LANES;
        }
        column += S::LANES;
    }
}

/// Converts V rows to f32; false if one holds an infinity or NaN.
///
/// # Safety
/// The block's rows are readable; `to` has the room.
#[inline(always)]
unsafe fn pack_values<S: Simd, T: VectorElement>(s: S, block: &Block<T>, dim: usize, to: Matrix) -> bool {
    let zero = s.splat(0.0);
    let mut check = zero;
    for (row, values) in block.v[..block.len].iter().enumerate() {
        let mut i = 0;
        while i < dim {
            // SAFETY: the caller's promise.
            unsafe {
                let x = T::load(s, values.add(i));
                // x * 0 is NaN for an infinity or NaN, and stays.
                check = s.fma(x, zero, check);
                s.store_f32(to.data.add(row * to.stride + i), x);
            }
            i += S::LANES;
        }
    }
    let mut lanes = [0.0; MAX_LANES];
    // SAFETY: no backend has more than MAX_LANES lanes.
    unsafe { s.store_f32(lanes.as_mut_ptr(), check) };
    lanes.iter().all(|lane| !lane.is_nan())
}

/// What [`gemm`] does for one row, over the columns that the row sees alone.
///
/// # Safety
/// `row` is inside the buffers, `visible` inside the tile.
#[inline(always)]
unsafe fn accumulate_row<S: Simd>(
    s: S,
    buffers: &Buffers,
    dim: usize,
    row: usize,
    visible: std::ops::Range<usize>,
) {
    let mut i = 0;
    while i < dim {
        // SAFETY: the caller's promise.
        unsafe {
            let to = buffers.accumulators.data.add(row * dim + i);
            let mut sum = s.mul(s.load_f32(to), s.splat(*buffers.decays.add(row)));
            for key in visible.clone() {
                let weight = s.splat(*buffers.scores.data.add(row * TILE_KEYS + key));
                sum = s.fma(weight, s.load_f32(buffers.values.data.add(key * dim + i)), sum);
            }
            s.store_f32(to, sum);
        }
        i += S::LANES;
    }
}

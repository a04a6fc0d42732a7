//! A register tile of query heads over a block of tokens.
//!
//! A block's logits are made in square register tiles (heads x tokens) that one transposed sum turns into a vector of
//! logits, so that no logit costs a horizontal sum of its own; the values are then accumulated in registers over a part of
//! the head dimension at a time.

use crate::attention::element::VectorElement;
use crate::attention::math::{exp2, tanh};
use crate::attention::rows::Block;
use crate::attention::simd::{MAX_LANES, Simd, group_max, group_sum};
use crate::attention::state::State;

/// Softmax state of a register tile: lane `head * tokens + token`, uniform over a head's lanes for the maximum.
#[derive(Clone, Copy)]
pub(crate) struct TileState<S: Simd> {
    max: S::V,
    sum: S::V,
}

/// Tokens of a register tile of `heads` heads.
const fn tile_tokens(lanes: usize, heads: usize) -> usize {
    lanes / heads.next_power_of_two()
}

impl<S: Simd> TileState<S> {
    #[inline(always)]
    pub fn empty(s: S) -> Self {
        Self { max: s.splat(f32::NEG_INFINITY), sum: s.splat(0.0) }
    }

    /// The state of one of the tile's `H` heads.
    #[inline(always)]
    pub fn of_head<const H: usize>(&self, s: S, head: usize) -> State {
        let tokens = tile_tokens(S::LANES, H);
        let total = match tokens {
            2 => group_sum::<S, 2>(s, self.sum),
            4 => group_sum::<S, 4>(s, self.sum),
            8 => group_sum::<S, 8>(s, self.sum),
            _ => group_sum::<S, 16>(s, self.sum),
        };
        let (mut max, mut sum) = ([0.0; MAX_LANES], [0.0; MAX_LANES]);
        // SAFETY: no backend has more than MAX_LANES lanes.
        unsafe {
            s.store_f32(max.as_mut_ptr(), self.max);
            s.store_f32(sum.as_mut_ptr(), total);
        }
        State { max: max[head * tokens], sum: sum[head * tokens] }
    }
}

/// Takes a block of tokens into the states and accumulators of `H` query heads.
///
/// # Safety
/// `q` and `acc` point to `H` rows of `dim` values, `weights` to `MAX_BLOCK_TOKENS * H.next_power_of_two()` values, and
/// the rows of `block` are readable.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "inlined into its one caller")]
pub(crate) unsafe fn tile_over_block<S: Simd, T: VectorElement, const H: usize>(
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
            let mut logits = tile_logits::<S, T, H>(s, q, dim, block, first, ahead);
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

/// Dot products of `H` queries with the K rows from `first` on, as many as a tile has; lane `head * tokens + token`.
///
/// # Safety
/// `q` points to `H` rows of `dim` values, the rows of `block` are readable, and `first` is inside it.
#[inline(always)]
unsafe fn tile_logits<S: Simd, T: VectorElement, const H: usize>(
    s: S,
    q: *const f32,
    dim: usize,
    block: &Block<T>,
    first: usize,
    ahead: Option<&Block<T>>,
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
                    ahead.prefetch(s, (*ahead.k.get_unchecked(first + t)).wrapping_add(i));
                }
                let k = T::load(s, block.k.get_unchecked(first + t).add(i));
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
                        ahead.prefetch(s, (*ahead.v.get_unchecked(first + t)).wrapping_add(at));
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

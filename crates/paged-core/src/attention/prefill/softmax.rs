//! The softmax of one row of a score tile.

use crate::attention::math::{exp2, tanh};
use crate::attention::simd::{MAX_LANES, Simd};
use crate::attention::state::State;

/// Turns the logits of a row into weights and takes them into the row's state. Columns outside `visible` get weight 0,
/// whatever they held. Returns the factor of what was accumulated before.
///
/// # Safety
/// `row` holds `num_columns` values, a multiple of the lanes.
#[inline(always)]
pub(crate) unsafe fn softmax_row<S: Simd>(
    s: S,
    row: *mut f32,
    num_columns: usize,
    visible: std::ops::Range<usize>,
    cap: Option<f32>,
    state: &mut State,
) -> f32 {
    let hidden = s.splat(f32::NEG_INFINITY);
    let is_masked = visible.start > 0 || visible.end < num_columns;
    let (begin, end) = (s.splat(visible.start as f32), s.splat(visible.end as f32));
    let mut lanes = [0.0; MAX_LANES];
    for (lane, value) in lanes.iter_mut().enumerate() {
        *value = lane as f32;
    }
    // SAFETY: the caller's promise; no backend has more than MAX_LANES lanes.
    unsafe {
        let mut column = s.load_f32(lanes.as_ptr());
        let mut max = hidden;
        let mut i = 0;
        while i < num_columns {
            let mut logits = s.load_f32(row.add(i));
            if let Some(cap) = cap {
                logits = s.mul(tanh(s, logits), s.splat(cap));
            }
            if is_masked {
                logits = s.select_lt(column, end, logits, hidden);
                logits = s.select_lt(column, begin, hidden, logits);
                column = s.add(column, s.splat(S::LANES as f32));
            }
            if is_masked || cap.is_some() {
                s.store_f32(row.add(i), logits);
            }
            max = s.max(logits, max);
            i += S::LANES;
        }
        let mut distance = 1;
        while distance < S::LANES {
            max = s.max(max, s.swap(max, distance));
            distance *= 2;
        }
        s.store_f32(lanes.as_mut_ptr(), s.max(max, s.splat(state.max)));
        let max = lanes[0];
        let base = State::safe_max(max);
        let mut sum = s.splat(0.0);
        let mut i = 0;
        while i < num_columns {
            let weight = exp2(s, s.sub(s.load_f32(row.add(i)), s.splat(base)));
            s.store_f32(row.add(i), weight);
            sum = s.add(sum, weight);
            i += S::LANES;
        }
        let mut distance = 1;
        while distance < S::LANES {
            sum = s.add(sum, s.swap(sum, distance));
            distance *= 2;
        }
        s.store_f32(lanes.as_mut_ptr(), exp2(s, s.splat(state.max - base)));
        let decay = lanes[0];
        s.store_f32(lanes.as_mut_ptr(), sum);
        *state = State { max, sum: state.sum * decay + lanes[0] };
        decay
    }
}

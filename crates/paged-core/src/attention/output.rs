//! From states and accumulators to output rows.

use super::element::store_any;
use super::launch::Launch;
use super::simd::Simd;
use super::state::State;

/// Writes the output row and the LSE of a query head; adds its sink.
///
/// # Safety
/// `row` and `head` are inside the launch, and this task alone writes them.
#[inline(always)]
pub(crate) unsafe fn write_output<S: Simd>(
    s: S,
    launch: &Launch,
    row: usize,
    head: usize,
    state: State,
    accumulator: &[f32],
) {
    // SAFETY: the caller's promise; head_dim is a multiple of the lanes.
    unsafe {
        let finish = state.finish(launch.softmax.sink(head));
        let scale = s.splat(finish.scale);
        let out = launch.out.at(row, head);
        let size = launch.out.element.size_bytes();
        let mut i = 0;
        while i < launch.head_dim {
            let x = s.mul(s.load_f32(accumulator.as_ptr().add(i)), scale);
            store_any(s, launch.out.element, out.add(i * size), x);
            i += S::LANES;
        }
        if let Some(lse) = &launch.lse {
            lse.at(row, head).cast::<f32>().write_unaligned(finish.lse);
        }
    }
}

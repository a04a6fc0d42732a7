//! Partial results of split rows, and their merge.
//!
//! A partial is an unnormalised accumulator with its softmax state, in f32. The merge runs in the order of the work list,
//! so the result does not depend on which thread finished first.

use crate::attention::launch::Launch;
use crate::attention::output::write_output;
use crate::attention::simd::{Kernel, Simd};
use crate::attention::state::State;

/// Workspace of a launch: `num_partials` x `num_qo_heads` accumulators, then as many states.
#[derive(Clone, Copy)]
pub(crate) struct Partials {
    data: *mut f32,
    num_partials: usize,
    num_qo_heads: usize,
    head_dim: usize,
}

// SAFETY: each task writes its own partial; they are read after all tasks have ended.
unsafe impl Send for Partials {}
// SAFETY: as above.
unsafe impl Sync for Partials {}

impl Partials {
    /// f32 values that a workspace takes.
    pub fn num_floats(num_partials: usize, launch: &Launch) -> usize {
        num_partials.saturating_mul(launch.num_qo_heads * (launch.head_dim + 2))
    }

    /// Carves the workspace out of `memory`, which holds at least [`Self::num_floats`] values.
    pub fn new(memory: &mut [f32], num_partials: usize, launch: &Launch) -> Self {
        debug_assert!(memory.len() >= Self::num_floats(num_partials, launch));
        Self {
            data: memory.as_mut_ptr(),
            num_partials,
            num_qo_heads: launch.num_qo_heads,
            head_dim: launch.head_dim,
        }
    }

    /// # Safety
    /// `partial` and `head` are inside the workspace.
    #[inline(always)]
    unsafe fn accumulator(&self, partial: usize, head: usize) -> *mut f32 {
        // SAFETY: the caller's promise.
        unsafe { self.data.add((partial * self.num_qo_heads + head) * self.head_dim) }
    }

    /// # Safety
    /// As `accumulator`.
    #[inline(always)]
    unsafe fn state(&self, partial: usize, head: usize) -> *mut State {
        let accumulators = self.num_partials * self.num_qo_heads * self.head_dim;
        // SAFETY: the caller's promise; a state is two f32.
        unsafe { self.data.add(accumulators + (partial * self.num_qo_heads + head) * 2).cast() }
    }

    /// # Safety
    /// As `accumulator`; this task alone writes the partial; `values` has `head_dim` values.
    #[inline(always)]
    pub unsafe fn write(&self, partial: usize, head: usize, state: State, values: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            self.state(partial, head).write(state);
            std::ptr::copy_nonoverlapping(values.as_ptr(), self.accumulator(partial, head), self.head_dim);
        }
    }
}

/// Merges the partials of one row and writes its output.
pub(crate) struct Merge<'a> {
    pub launch: &'a Launch,
    pub partials: Partials,
    pub row: usize,
    /// The row's partials, in the order of the work list.
    pub of_row: &'a [u32],
    /// `head_dim` values.
    pub accumulator: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { launch, partials, row, of_row, accumulator } = self;
        for head in 0..launch.num_qo_heads {
            // SAFETY: `of_row` holds partials that the tasks of this launch wrote.
            unsafe {
                let mut max = f32::NEG_INFINITY;
                for partial in of_row {
                    max = max.max((*partials.state(*partial as usize, head)).max);
                }
                let base = State::safe_max(max);
                let mut sum = 0.0;
                accumulator.fill(0.0);
                for partial in of_row {
                    let state = *partials.state(*partial as usize, head);
                    let weight = (state.max - base).exp2();
                    sum += state.sum * weight;
                    let values = partials.accumulator(*partial as usize, head);
                    let mut i = 0;
                    while i < launch.head_dim {
                        let to = accumulator.as_mut_ptr().add(i);
                        s.store_f32(to, s.fma(s.load_f32(values.add(i)), s.splat(weight), s.load_f32(to)));
                        i += S::LANES;
                    }
                }
                write_output(s, launch, row, head, State { max, sum }, accumulator);
            }
        }
    }
}

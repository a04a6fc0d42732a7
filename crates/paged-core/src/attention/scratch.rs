//! Cache-line aligned f32 memory that a thread keeps from launch to launch.

use std::cell::Cell;

use crate::error::{Error, Result};

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Grows to the largest size asked for and is never given back.
#[derive(Default)]
pub(crate) struct Scratch(Vec<Line>);

impl Scratch {
    /// At least `len` values, with whatever was last stored in them.
    pub fn floats(&mut self, len: usize) -> &mut [f32] {
        let num_lines = len.div_ceil(16);
        if self.0.len() < num_lines {
            self.0.resize(num_lines, Line([0.0; 16]));
        }
        // SAFETY: a line is 16 floats without padding.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 16) }
    }
}

impl Scratch {
    /// As [`Self::floats`], for a size that arguments decide.
    ///
    /// # Errors
    /// `AllocationFailed`.
    pub fn try_floats(&mut self, len: usize) -> Result<&mut [f32]> {
        let num_missing = len.div_ceil(16).saturating_sub(self.0.len());
        let bytes = len.saturating_mul(size_of::<f32>());
        self.0.try_reserve_exact(num_missing).map_err(|_| Error::AllocationFailed { bytes })?;
        Ok(self.floats(len))
    }
}

thread_local! {
    static TASK: Cell<Option<Scratch>> = const { Cell::new(None) };
    static LAUNCH: Cell<Option<Scratch>> = const { Cell::new(None) };
}

/// Lends the thread's memory for one task.
pub(crate) fn with_task_scratch<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    lend(&TASK, f)
}

/// Lends the launching thread's memory, which its tasks share, for one launch.
pub(crate) fn with_launch_scratch<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    lend(&LAUNCH, f)
}

fn lend<R>(
    key: &'static std::thread::LocalKey<Cell<Option<Scratch>>>,
    f: impl FnOnce(&mut Scratch) -> R,
) -> R {
    let mut scratch = key.take().unwrap_or_default();
    let result = f(&mut scratch);
    key.set(Some(scratch));
    result
}

//! The count of steps that the tables of a decode batch share, so that a step in which every table gets a token touches none.
//!
//! A table in a batch keeps its tokens as a difference to this count. Whoever changes such a table by another way takes it off
//! the clock first (`interrupt`), which also stops the clock: no step is counted until the batch has looked at its tables again
//! (`resume`). Count and stop flag are one atomic, so a step is either counted before a table is taken off, and the table has
//! it, or refused.

use crate::primitive::{AtomicU64, Ordering};

pub(crate) struct StepClock {
    /// Steps in the upper 63 bits, 1 in the lowest while the clock is stopped.
    state: AtomicU64,
}

const STOPPED: u64 = 1;

impl StepClock {
    pub(crate) fn new() -> Self {
        Self { state: AtomicU64::new(0) }
    }

    /// Steps counted so far.
    pub(crate) fn num_steps(&self) -> u64 {
        // Pairs with the AcqRel exchange in `step` and the Release store in `resume`.
        self.state.load(Ordering::Acquire) >> 1
    }

    /// As `num_steps`; `None` while the clock is stopped.
    pub(crate) fn running(&self) -> Option<u64> {
        // Pairs with the AcqRel exchange in `step` and the Release store in `resume`.
        let state = self.state.load(Ordering::Acquire);
        (state & STOPPED == 0).then_some(state >> 1)
    }

    /// Counts a step; false, and nothing counted, if the clock is stopped or not at `now`.
    pub(crate) fn step(&self, now: u64) -> bool {
        // AcqRel: Release for the Acquire loads of `num_steps`, Acquire for what `interrupt` released.
        self.state.compare_exchange(now << 1, (now + 1) << 1, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Stops the clock and returns its steps. The caller holds a table that is on the clock, alone.
    pub(crate) fn interrupt(&self) -> u64 {
        // AcqRel: pairs with `step`, which fails from here on.
        self.state.fetch_or(STOPPED, Ordering::AcqRel) >> 1
    }

    /// Lets a stopped clock run. The caller holds every table that is on the clock, alone.
    pub(crate) fn resume(&self) {
        // Release: pairs with the Acquire loads in `running` and `num_steps`.
        self.state.fetch_and(!STOPPED, Ordering::Release);
    }
}

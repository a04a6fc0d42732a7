//! A door that helpers may pass until its owner closes it: how a launch ends without waiting for threads that never came.

use crate::primitive::{AtomicUsize, Ordering};

/// Set once the door is closed; the bits below count the helpers inside.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// Lets helpers in while it is open. After [`Gate::close`] nobody is inside and nobody gets in.
#[derive(Debug)]
pub struct Gate {
    state: AtomicUsize,
}

impl Gate {
    /// An open gate with nobody inside.
    #[must_use]
    pub fn new() -> Self {
        Self { state: AtomicUsize::new(0) }
    }

    /// Enters, unless the gate is closed. Whoever is inside must call [`Gate::leave`].
    #[must_use]
    pub fn enter(&self) -> bool {
        // Acquire (here and below) pairs with the Release half of other helpers' exchanges; what the owner prepared reaches a helper
        // through the queue that handed it the work.
        let mut state = self.state.load(Ordering::Acquire);
        while state & CLOSED == 0 {
            match self.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    /// Leaves, after [`Gate::enter`] returned true.
    pub fn leave(&self) {
        // Release pairs with the Acquire loads of `close`: the owner sees all that the helper did inside.
        self.state.fetch_sub(1, Ordering::Release);
    }

    /// Closes the gate and waits until everybody inside has left. `wait` is called between looks.
    pub fn close(&self, mut wait: impl FnMut()) {
        // Acquire pairs with the Release of `leave`; Release pairs with the Acquire of `enter`.
        let mut state = self.state.fetch_or(CLOSED, Ordering::AcqRel);
        while state & !CLOSED != 0 {
            wait();
            state = self.state.load(Ordering::Acquire);
        }
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}

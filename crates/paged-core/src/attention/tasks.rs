//! The tasks of one launch, shared by the threads that come in time.
//!
//! A launch must not wait for a thread that has not started: on a busy machine that takes longer than the launch. So helpers own a
//! share of the tasks' bookkeeping, and reach the caller's closure only through a [`Gate`] that the caller closes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::gate::Gate;

/// Looks at the gate before the caller offers its core to others.
const NUM_SPINS: usize = 64;

/// A borrowed closure and the numbers of the tasks that are left.
pub(crate) struct Tasks {
    task: *const (dyn Fn(usize) + Sync),
    num_tasks: usize,
    next: AtomicUsize,
    gate: Gate,
    has_panicked: AtomicBool,
}

// SAFETY: the closure is `Sync`, and is called only by its owner and inside the gate, which the owner closes before the closure ends.
unsafe impl Send for Tasks {}
// SAFETY: as above; the rest is atomic.
unsafe impl Sync for Tasks {}

impl Tasks {
    /// Runs `task(0..num_tasks)` on this thread and on those that `recruit` gets to call [`Tasks::help`] in time. When it returns or
    /// unwinds, no thread touches `task` any more.
    ///
    /// # Panics
    /// If a task panicked, here or on another thread.
    pub fn run(num_tasks: usize, task: &(dyn Fn(usize) + Sync), recruit: impl FnOnce(&Arc<Self>)) {
        let task: *const (dyn Fn(usize) + Sync + '_) = task;
        // SAFETY: only forgets the lifetime; the gate below is closed before this function ends, and with it the lifetime.
        let task: *const (dyn Fn(usize) + Sync + 'static) = unsafe { std::mem::transmute(task) };
        let tasks = Arc::new(Self {
            task,
            num_tasks,
            next: AtomicUsize::new(0),
            gate: Gate::new(),
            has_panicked: AtomicBool::new(false),
        });
        let close = CloseOnDrop(&tasks.gate);
        recruit(&tasks);
        tasks.work();
        drop(close);
        // Acquire pairs with the Release store in `help`.
        assert!(!tasks.has_panicked.load(Ordering::Acquire), "a task panicked on another thread");
    }

    /// Works on tasks until none is left, on a thread that may come too late.
    pub fn help(&self) {
        if !self.gate.enter() {
            return;
        }
        if catch_unwind(AssertUnwindSafe(|| self.work())).is_err() {
            // Release pairs with the Acquire load in `run`.
            self.has_panicked.store(true, Ordering::Release);
        }
        self.gate.leave();
    }

    fn work(&self) {
        loop {
            // Relaxed: only hands out numbers; the gate publishes what tasks wrote.
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.num_tasks {
                return;
            }
            // SAFETY: the closure is alive: this is its owner, or a helper inside the gate.
            unsafe { (*self.task)(index) };
        }
    }
}

struct CloseOnDrop<'a>(&'a Gate);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        let mut num_looks = 0;
        self.0.close(|| {
            num_looks += 1;
            if num_looks < NUM_SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_whoever_comes() {
        for num_helpers in 0..4 {
            let counts: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            let count = |index: usize| {
                counts[index].fetch_add(1, Ordering::Relaxed);
            };
            Tasks::run(counts.len(), &count, |tasks| {
                for _ in 0..num_helpers {
                    let tasks = Arc::clone(tasks);
                    std::thread::spawn(move || tasks.help());
                }
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn a_helper_that_comes_too_late_finds_the_gate_closed() {
        let mut late = None;
        Tasks::run(3, &|_| {}, |tasks| late = Some(Arc::clone(tasks)));
        // The closure is gone: calling it would be a use after free.
        late.unwrap().help();
    }

    #[test]
    fn a_panic_of_a_helper_reaches_the_caller() {
        let caller = std::thread::current().id();
        let helper_came = AtomicBool::new(false);
        let task = |_| {
            if std::thread::current().id() != caller {
                // Release pairs with the Acquire load below.
                helper_came.store(true, Ordering::Release);
                panic!("on purpose");
            }
            // Acquire pairs with the Release store above.
            while !helper_came.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        };
        let result = catch_unwind(AssertUnwindSafe(|| {
            Tasks::run(50, &task, |tasks| {
                let tasks = Arc::clone(tasks);
                std::thread::spawn(move || tasks.help());
            });
        }));
        assert!(result.is_err());
    }
}

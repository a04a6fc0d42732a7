//! The threads and the instruction set that launches run with.

use std::sync::{Arc, OnceLock};

use super::simd::SimdLevel;
use super::tasks::Tasks;
use crate::error::{Error, Result};

/// Below this much work the other threads are not woken: waking one costs about as much.
const MIN_PARALLEL_BYTES: usize = 128 * 1024;

/// A pool of threads and a SIMD level. The calling thread takes part in each launch.
///
/// Tasks are taken from a shared counter, so which thread runs a task varies, but each task's result does not depend on
/// the thread: the same launch gives the same bits every time, with any number of threads.
pub struct Executor {
    simd: SimdLevel,
    helpers: Option<rayon::ThreadPool>,
    num_helpers: usize,
    process_id: u32,
}

impl Executor {
    /// The executor of the process: every core, the fastest SIMD level.
    pub fn global() -> &'static Self {
        static GLOBAL: OnceLock<Executor> = OnceLock::new();
        GLOBAL.get_or_init(|| {
            let num_threads = std::thread::available_parallelism().map_or(1, usize::from);
            // Without threads the caller's own does all the work.
            Self::new(SimdLevel::detect(), num_threads).unwrap_or_else(|_| Self::single(SimdLevel::detect()))
        })
    }

    /// An executor with `num_threads` threads, the caller's included.
    ///
    /// # Errors
    /// `InvalidArgument` if this processor lacks the level, `num_threads` is 0, or the threads cannot be started.
    pub fn new(simd: SimdLevel, num_threads: usize) -> Result<Self> {
        if !simd.is_available() {
            return Err(Error::invalid("simd", format!("this processor has no {}", simd.name())));
        }
        let num_helpers = num_threads
            .checked_sub(1)
            .ok_or_else(|| Error::invalid("num_threads", "0 threads, expected 1 or more"))?;
        if num_helpers == 0 {
            return Ok(Self::single(simd));
        }
        let helpers = rayon::ThreadPoolBuilder::new()
            .num_threads(num_helpers)
            .thread_name(|index| format!("paged-attention-{index}"))
            .build()
            .map_err(|e| Error::invalid("num_threads", format!("cannot start {num_helpers} threads: {e}")))?;
        Ok(Self { simd, helpers: Some(helpers), num_helpers, process_id: std::process::id() })
    }

    fn single(simd: SimdLevel) -> Self {
        Self { simd, helpers: None, num_helpers: 0, process_id: std::process::id() }
    }

    /// The SIMD level of the kernels.
    pub fn simd(&self) -> SimdLevel {
        self.simd
    }

    /// Threads that take part in a launch.
    pub fn num_threads(&self) -> usize {
        self.num_helpers + 1
    }

    /// Runs `task(0..num_tasks)`, in that order of start, on as many threads as `num_bytes` of work are worth.
    pub fn run(&self, num_tasks: usize, num_bytes: usize, task: impl Fn(usize) + Sync) {
        // A forked child has none of its parent's threads.
        let helpers = self.helpers.as_ref().filter(|_| {
            num_tasks > 1 && num_bytes >= MIN_PARALLEL_BYTES && self.process_id == std::process::id()
        });
        let Some(helpers) = helpers else {
            return (0..num_tasks).for_each(task);
        };
        Tasks::run(num_tasks, &task, |tasks| {
            for _ in 0..self.num_helpers.min(num_tasks - 1) {
                let tasks = Arc::clone(tasks);
                helpers.spawn(move || tasks.help());
            }
        });
    }
}

//! What a plan is built with, and the capacities that follow.

use crate::error::{Error, Result};
use crate::geometry::{HeadGeometry, MAX_INDEX, MAX_PAGE_SIZE, check_count};

/// Most rows a plan can hold.
pub const MAX_SLOTS: usize = 1 << 16;

/// Most work items a plan can hold.
pub const MAX_WORK_ITEMS: usize = 1 << 22;

/// Chunk of `batch_invariant` mode in tokens: long enough that a chunk's partial result is negligible against its reads.
pub const FIXED_CHUNK_TOKENS: usize = 512;

/// Work units per worker and step that a plan aims at by default. Threads take units from a queue, longest first, so one
/// worker ends at most one unit, a quarter of its share, after the others.
pub const DEFAULT_WAVES: usize = 4;

/// How to build a [`DecodePlan`](super::DecodePlan).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanConfig {
    /// Rows of the resident table.
    pub max_slots: usize,
    /// Pages that one row can hold.
    pub max_pages_per_slot: usize,
    /// Pages of the pool: every page id is below.
    pub num_pages: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Query heads, KV heads, elements per head.
    pub heads: HeadGeometry,
    /// Visible tokens per row, the newest included; `None` for all.
    pub window: Option<usize>,
    /// Entries of the work list; `None` for the number that the other values can need.
    pub num_work_items: Option<usize>,
    /// Work units, (item, KV head) pairs, that run at once; `None` for the threads of this machine.
    pub num_workers: Option<usize>,
    /// Units per worker to aim at: [`DEFAULT_WAVES`] for a queue of threads, 1 for a grid that should be one wave.
    pub waves: usize,
    /// Upper bound of items per row; `None` for no bound.
    pub num_splits: Option<usize>,
    /// Fixed chunks at absolute positions, so that a row's items do not depend on the other rows.
    pub batch_invariant: bool,
}

impl PlanConfig {
    /// A configuration with the optional values at their defaults.
    pub fn new(
        max_slots: usize,
        max_pages_per_slot: usize,
        num_pages: usize,
        page_size: usize,
        heads: HeadGeometry,
    ) -> Self {
        Self {
            max_slots,
            max_pages_per_slot,
            num_pages,
            page_size,
            heads,
            window: None,
            num_work_items: None,
            num_workers: None,
            waves: DEFAULT_WAVES,
            num_splits: None,
            batch_invariant: false,
        }
    }

    /// Checks every value and derives the capacities.
    ///
    /// # Errors
    /// `InvalidArgument` that names the first value out of range.
    pub(super) fn resolve(self) -> Result<Capacities> {
        self.heads.check()?;
        check_count("max_slots", self.max_slots, MAX_SLOTS)?;
        check_count("num_pages", self.num_pages, MAX_INDEX)?;
        check_count("page_size", self.page_size, MAX_PAGE_SIZE)?;
        // Lengths are i32, and one more must still fit.
        check_count("max_pages_per_slot", self.max_pages_per_slot, (MAX_INDEX - 1) / self.page_size)?;
        check_count("waves", self.waves, 64)?;
        for (argument, value) in [("window", self.window), ("num_splits", self.num_splits)] {
            value.map_or(Ok(0), |value| check_count(argument, value, MAX_INDEX))?;
        }
        let num_workers = match self.num_workers {
            Some(workers) => check_count("num_workers", workers, 1 << 20)?,
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let row_stride = row_stride(self.max_pages_per_slot, self.window);
        if row_stride > MAX_INDEX / self.max_slots {
            return Err(Error::invalid(
                "max_pages_per_slot",
                format!(
                    "{} slots of {} pages exceed {MAX_INDEX} page ids",
                    self.max_slots, self.max_pages_per_slot
                ),
            ));
        }
        let split_target = split_target(num_workers, self.heads.num_kv_heads, self.waves);
        let needed =
            if self.batch_invariant { self.fixed_chunk_items() } else { split_target + self.max_slots };
        let num_work_items = match self.num_work_items {
            // Without enough items for every row the batch could not run; fixed chunks can't be merged to fit.
            Some(items) => {
                let least = if self.batch_invariant { needed } else { self.max_slots };
                if items < least {
                    return Err(Error::invalid(
                        "num_work_items",
                        format!("expected {least} or more, got {items}"),
                    ));
                }
                check_count("num_work_items", items, MAX_WORK_ITEMS)?
            }
            None => check_count("num_work_items", needed, MAX_WORK_ITEMS)?,
        };
        Ok(Capacities { row_stride, split_target, num_work_items, config: self })
    }

    /// Items that a batch of full rows needs in fixed chunks: one more than chunks per row, as chunks start anywhere.
    fn fixed_chunk_items(&self) -> usize {
        let tokens = self.max_pages_per_slot * self.page_size;
        let chunks = tokens.div_ceil(FIXED_CHUNK_TOKENS) + 1;
        self.max_slots.saturating_mul(self.num_splits.map_or(chunks, |splits| chunks.min(splits)))
    }
}

/// A checked configuration with its derived capacities.
#[derive(Debug, Clone)]
pub(super) struct Capacities {
    pub(super) config: PlanConfig,
    /// Page ids from one row to the next.
    pub(super) row_stride: usize,
    /// Items that make the wished number of units.
    pub(super) split_target: usize,
    /// Entries of the work list.
    pub(super) num_work_items: usize,
}

/// An odd number of 64-byte lines: the same column of consecutive rows then falls into different cache sets, which a
/// power-of-two stride would map to one. Window rows get spare room, as their head moves; see `edit::append_page`.
fn row_stride(max_pages: usize, window: Option<usize>) -> usize {
    const IDS_PER_LINE: usize = 16;
    let spare = if window.is_some() { max_pages.max(IDS_PER_LINE) } else { 0 };
    ((max_pages + spare).div_ceil(IDS_PER_LINE) | 1) * IDS_PER_LINE
}

/// Items per step that give each worker about `waves` units of one KV head each.
fn split_target(num_workers: usize, num_kv_heads: usize, waves: usize) -> usize {
    if waves == 1 {
        // One wave must not spill into a second.
        return (num_workers / num_kv_heads).max(1);
    }
    // Whole rounds: items x heads is a multiple of the workers, so equal items end together.
    let round = num_workers / gcd(num_workers, num_kv_heads);
    (waves * num_workers).div_ceil(num_kv_heads).next_multiple_of(round)
}

const fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

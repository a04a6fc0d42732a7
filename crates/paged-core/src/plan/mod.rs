//! The decode plan: what one decode step of a batch reads, kept up to date step by step.
//!
//! A plan belongs to one KV group. It holds a **row table** (pages, length, first page offset and position of each
//! sequence) and a **work list** (chunks of rows, balanced by length). A steady step costs one [`DecodePlan::advance`]; page
//! crossings, admissions and finishes are small edits. The work list is divided anew only when rows come or go or when its
//! longest chunk has outgrown the bound of [`IMBALANCE_BOUND`].
//!
//! # Reading a plan in a kernel
//! ```
//! use paged_core::plan::{DecodePlan, PlanConfig};
//! use paged_core::HeadGeometry;
//!
//! let heads = HeadGeometry { num_qo_heads: 8, num_kv_heads: 2, head_dim: 64 };
//! let mut plan = DecodePlan::new(PlanConfig::new(4, 64, 1000, 16, heads))?;
//! plan.admit(&[7, 9], 20, 0, None)?;
//! plan.advance()?; // 21 tokens now; the kernel writes and reads the new one
//! plan.ensure_work_list(); // cheap, once per step
//! let work = plan.work()?; // borrows the plan: it cannot change while a kernel runs
//! for item in work.items {
//!     let row = plan.slot_row(item.slot as u32).unwrap();
//!     for token in item.tokens(row.length, plan.config().window) {
//!         // counted from the row's first table token
//!         let at = row.first_page_offset + token;
//!         let _page = row.pages[at / plan.config().page_size]; // always below num_pages
//!         let _entry = at % plan.config().page_size;
//!     }
//!     // item.is_split() ? partial row item.out_row : batch row item.out_row
//! }
//! for merge in work.merges {
//!     let _partials = merge.partial_begin..merge.partial_begin + merge.num_partials; // -> batch row merge.row
//! }
//! # Ok::<(), paged_core::Error>(())
//! ```
//! `plan.row(r)` is the same view by batch row: the row of `q` and `out`. Rows are `0..num_rows`, in the order of admission.
//! Items come longest first; work units are (item, KV head) pairs. Partial rows number at most `num_work_items`.
//! [`DecodePlan::stream_items`] gives the CUDA kernel's form of the list.
//!
//! # Words
//! * `length`: tokens in the table from `first_page_offset` on, the newest included. A window trims on top of it: the
//!   newest `min(length, window)` tokens are visible.
//! * `position`: absolute position of the **next** token, so the newest token sits at `position - 1`.
//! * `epoch`: changes with every edit. (epoch, slot generations) identify the plan's state, see [`DecodePlan::identity`].
//!
//! # Threads
//! One writer through `&mut`. [`DecodePlan::reader`] gives handles for other threads, which copy a consistent state without
//! ever making the writer wait (sequence lock; H.-J. Boehm, "Can seqlocks get along with programming language memory models?",
//! MSPC 2012, in the variant without fences).

mod config;
mod csr;
mod device;
mod edit;
mod publish;
mod resident;
mod split;
mod stream;
mod validate;
// Loom's atomics are not plain integers, so there is nothing to borrow.
#[cfg(not(paged_loom))]
mod view;
mod work;

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::Slot;
use crate::primitive::AtomicI32;
use config::Capacities;
use resident::{Resident, own, own_u32, own_u64, publish, publish_u32};
use split::{RowExtent, SplitResult, target_chunk};

pub use config::{DEFAULT_WAVES, FIXED_CHUNK_TOKENS, MAX_SLOTS, MAX_WORK_ITEMS, PlanConfig};
pub use csr::{Csr, CsrView, import_config};
pub use device::{DeviceLayout, DeviceMirror};
pub use publish::{PlanReader, PlanSnapshot};
pub use split::{MIN_CHUNK_TOKENS, SLICE_TOKENS};
pub use stream::{STREAM_IMBALANCE_BOUND, STREAM_QUANTUM_TOKENS, StreamItem, StreamList};
#[cfg(not(paged_loom))]
pub use view::PlanArray;
pub use work::{MergeRow, Work, WorkItem};

/// No item is longer than this many times the target chunk (numerator, denominator), the share of one of `split_target` equal
/// chunks but at least [`MIN_CHUNK_TOKENS`]. Where `num_splits` or `num_work_items` forbids such a split, no item outgrows
/// [`CAPPED_GROWTH_BOUND`] times the longest item of a fresh one.
pub const IMBALANCE_BOUND: (usize, usize) = (3, 2);

/// See [`IMBALANCE_BOUND`].
pub const CAPPED_GROWTH_BOUND: (usize, usize) = (6, 5);

/// One row of the table, borrowed from the plan.
#[derive(Debug, Clone, Copy)]
pub struct RowView<'a> {
    /// Row of the resident table.
    pub slot: u32,
    /// Held pages, in order; may include spare pages after the last token.
    pub pages: &'a [i32],
    /// Tokens from `first_page_offset` on.
    pub length: usize,
    /// Entries of the first page before the first token, less than the page size.
    pub first_page_offset: usize,
    /// Absolute position of the next token.
    pub position: usize,
}

/// The plan of one KV group's decode batch. See the [module](self).
pub struct DecodePlan {
    capacities: Capacities,
    resident: Arc<Resident>,
    /// Slots that hold no row; the next one to give out is last.
    free_slots: Vec<u32>,
    /// `[row]` slot, a plain copy of the resident array for the writer's loops.
    rows: Vec<u32>,
    /// `[slot]` batch row, or `NO_ROW`.
    slot_rows: Vec<u32>,
    /// `[slot]` the step, counted as `Pace::num_advances`, at which the row's pages are full.
    full_at: Vec<u64>,
    /// `[slot]` grows when pages are put down or moved, unlike when one is added at the end.
    row_versions: Vec<u64>,
    pace: Pace,
    /// No live row's position is above it.
    max_position: usize,
    work: SplitResult,
    is_work_current: bool,
    /// Steps since the work list was divided.
    num_steps: usize,
    extents: Vec<RowExtent>,
}

const NO_ROW: u32 = u32::MAX;

/// What a steady step looks at, side by side: between two steps all this leaves the caches.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// Steps taken by [`DecodePlan::advance`].
    num_advances: u64,
    /// No live row is full at an earlier step.
    next_full: u64,
    /// Edits, steps apart.
    num_edits: u64,
    /// Edits by which rows came or went.
    num_row_changes: u64,
}

fn row_extent(resident: &Resident, slot: u32) -> RowExtent {
    let index = slot as usize;
    RowExtent {
        slot,
        length: own(&resident.lengths[index]) as usize,
        first_page_offset: own(&resident.first_page_offsets[index]) as usize,
        position: own(&resident.positions[index]) as usize,
    }
}

impl DecodePlan {
    /// Builds a plan without rows. Its storage is fixed; memory is committed as rows are used.
    ///
    /// # Errors
    /// `InvalidArgument` that names the first value out of range, `AllocationFailed`.
    pub fn new(config: PlanConfig) -> Result<Self> {
        let capacities = config.resolve()?;
        let max_slots = capacities.config.max_slots;
        Ok(Self {
            resident: Arc::new(Resident::new(&capacities)?),
            free_slots: (0..max_slots as u32).rev().collect(),
            rows: Vec::with_capacity(max_slots),
            slot_rows: vec![NO_ROW; max_slots],
            full_at: vec![0; max_slots],
            row_versions: vec![0; max_slots],
            pace: Pace { num_advances: 0, next_full: u64::MAX, num_edits: 0, num_row_changes: 0 },
            max_position: 0,
            work: SplitResult::default(),
            is_work_current: true,
            num_steps: 0,
            extents: Vec::with_capacity(max_slots),
            capacities,
        })
    }

    /// The configuration that the plan was built with.
    pub fn config(&self) -> &PlanConfig {
        &self.capacities.config
    }

    /// Entries of the work list, and the most partial rows that a step can have.
    pub fn num_work_items(&self) -> usize {
        self.capacities.num_work_items
    }

    /// Chunks that the split aims at over the whole batch.
    pub fn split_target(&self) -> usize {
        self.capacities.split_target
    }

    /// Rows of the batch.
    pub fn num_rows(&self) -> usize {
        self.rows.len()
    }

    /// Number of edits so far.
    pub fn epoch(&self) -> u64 {
        own_u64(&self.resident.epoch)
    }

    /// The state's identity: the epoch, and the slots with their generations in row order.
    pub fn identity(&self) -> (u64, Vec<Slot>) {
        (self.epoch(), self.rows.iter().map(|&index| self.live_slot(index)).collect())
    }

    /// A handle for readers on other threads.
    pub fn reader(&self) -> PlanReader {
        PlanReader::new(Arc::clone(&self.resident), &self.capacities)
    }

    /// The batch row of a slot.
    ///
    /// # Errors
    /// `StaleSlot`.
    pub fn row_of(&self, slot: Slot) -> Result<usize> {
        let row = self.slot_rows.get(slot.index as usize).copied().unwrap_or(NO_ROW);
        let found = self.resident.generations.get(slot.index as usize).map_or(0, own_u32);
        if row == NO_ROW || found != slot.generation {
            return Err(Error::StaleSlot { index: slot.index, expected: slot.generation, found });
        }
        Ok(row as usize)
    }

    /// The slot of a batch row.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such row.
    pub fn slot_of(&self, row: usize) -> Result<Slot> {
        match self.rows.get(row) {
            Some(&index) => Ok(self.live_slot(index)),
            None => Err(Error::invalid("row", format!("expected 0..{}, got {row}", self.rows.len()))),
        }
    }

    /// Slots whose next token starts a new page, in row order.
    pub fn rows_needing_page(&self) -> Vec<Slot> {
        if self.pace.num_advances < self.pace.next_full {
            return Vec::new();
        }
        let full = self.rows.iter().filter(|&&index| self.room(index as usize) == 0);
        full.map(|&index| self.live_slot(index)).collect()
    }

    /// Divides the batch anew if rows came or went or the bound is passed; true if it did.
    pub fn ensure_work_list(&mut self) -> bool {
        if self.is_work_current {
            return false;
        }
        self.extents.clear();
        self.extents.extend(self.rows.iter().map(|&index| row_extent(&self.resident, index)));
        let num_old = self.work.items.len();
        self.work.split(&self.extents, &self.capacities);
        self.num_steps = 0;
        self.is_work_current = true;

        let section = self.resident.write();
        let fields = self.work.items.iter().flat_map(WorkItem::fields);
        self.resident.work_items.iter().zip(fields).for_each(|(cell, value)| publish(cell, value));
        // Items that were in use and no longer are: readers on a device stop at the flag.
        for item in self.work.items.len()..num_old {
            let begin = item * WorkItem::NUM_FIELDS;
            self.resident.work_items[begin..begin + WorkItem::NUM_FIELDS]
                .iter()
                .for_each(|cell| publish(cell, 0));
        }
        let fields = self.work.merges.iter().flat_map(MergeRow::fields);
        self.resident.merge_rows.iter().zip(fields).for_each(|(cell, value)| publish(cell, value));
        publish_u32(&self.resident.num_items, self.work.items.len() as u32);
        publish_u32(&self.resident.num_merges, self.work.merges.len() as u32);
        publish_u32(&self.resident.is_work_current, 1);
        section.bump_epoch();
        drop(section);
        debug_assert_eq!(self.validate(), Ok(()));
        true
    }

    /// The work list of the coming step.
    ///
    /// # Errors
    /// `InvalidPlan` if [`ensure_work_list`](Self::ensure_work_list) has to be called first.
    pub fn work(&self) -> Result<Work<'_>> {
        if !self.is_work_current {
            return Err(Error::invalid_plan(
                "the work list is older than the rows: call ensure_work_list first",
            ));
        }
        Ok(Work {
            items: &self.work.items,
            merges: &self.work.merges,
            num_partial_rows: self.work.num_partial_rows,
        })
    }

    /// True if the bounds allow an item of `longest` tokens now.
    fn allows_longest(&self, longest: usize) -> bool {
        let num_rows = self.rows.len();
        let grown = if self.config().window.is_none() { self.num_steps * num_rows } else { 0 };
        let split_target = self.capacities.split_target.min(self.capacities.num_work_items - num_rows).max(1);
        let target = target_chunk(self.work.num_tokens + grown, split_target);
        longest * IMBALANCE_BOUND.1 <= target * IMBALANCE_BOUND.0
            || longest * CAPPED_GROWTH_BOUND.1 <= self.work.longest * CAPPED_GROWTH_BOUND.0
    }

    /// True if the work list is as good as the bounds ask for at the present lengths. Constant time.
    fn is_balanced(&self) -> bool {
        if self.config().batch_invariant {
            self.num_steps <= self.work.num_valid_steps
        } else {
            self.allows_longest(self.work.longest.max(self.work.longest_last + self.num_steps))
        }
    }

    /// Steps taken so far.
    pub(crate) const fn num_advances(&self) -> u64 {
        self.pace.num_advances
    }

    /// Edits so far by which rows came or went.
    pub(crate) const fn num_row_changes(&self) -> u64 {
        self.pace.num_row_changes
    }

    /// Tokens that fit the row's pages beyond its length.
    fn room(&self, slot: usize) -> u64 {
        self.full_at[slot] - self.pace.num_advances
    }

    /// Notes a new row with room for `room` tokens.
    fn start_pace(&mut self, slot: usize, room: usize) {
        self.full_at[slot] = self.pace.num_advances + room as u64;
        self.pace.next_full = self.pace.next_full.min(self.full_at[slot]);
        self.pace.num_edits += 1;
        self.pace.num_row_changes += 1;
    }

    fn live_slot(&self, index: u32) -> Slot {
        Slot { index, generation: own_u32(&self.resident.generations[index as usize]) }
    }

    fn held_pages(&self, index: usize) -> &[AtomicI32] {
        let start = own(&self.resident.row_start[index]) as usize;
        &self.resident.page_ids[start..start + own(&self.resident.row_num_pages[index]) as usize]
    }
}

//! The resident arrays: fixed storage that the writer changes in place and any thread may read.
//!
//! Only [`DecodePlan`](super::DecodePlan) stores into them, through `&mut self` and inside a [`WriteSection`]. Whoever
//! holds `&DecodePlan` therefore reads arrays that stand still; everybody else goes through
//! [`PlanReader`](super::PlanReader), which notices a write under way.

use crossbeam_utils::CachePadded;

use super::config::Capacities;
use super::work::{MergeRow, WorkItem};
use crate::error::Result;
use crate::primitive::{AtomicI32, AtomicU32, AtomicU64, Ordering, zeroed};

/// `[slot]` unless another index is given; all i32.
pub(super) struct Resident {
    /// Odd while a write is under way.
    pub(super) sequence: CachePadded<AtomicU64>,
    pub(super) epoch: AtomicU64,
    pub(super) num_rows: AtomicU32,
    pub(super) num_items: AtomicU32,
    pub(super) num_merges: AtomicU32,
    /// 1 if the work list fits the rows.
    pub(super) is_work_current: AtomicU32,
    /// Index of the row's first page in `page_ids`.
    pub(super) row_start: Box<[AtomicI32]>,
    pub(super) row_num_pages: Box<[AtomicI32]>,
    pub(super) lengths: Box<[AtomicI32]>,
    pub(super) first_page_offsets: Box<[AtomicI32]>,
    pub(super) positions: Box<[AtomicI32]>,
    pub(super) generations: Box<[AtomicU32]>,
    /// `[row]`, `num_rows` in use: the slot of a batch row.
    pub(super) row_slots: Box<[AtomicI32]>,
    /// `[max_slots * row_stride]`
    pub(super) page_ids: Box<[AtomicI32]>,
    /// `[num_work_items, 5]`
    pub(super) work_items: Box<[AtomicI32]>,
    /// `[max_slots, 3]`
    pub(super) merge_rows: Box<[AtomicI32]>,
}

impl Resident {
    pub(super) fn new(capacities: &Capacities) -> Result<Self> {
        let slots = capacities.config.max_slots;
        Ok(Self {
            sequence: CachePadded::new(AtomicU64::new(0)),
            epoch: AtomicU64::new(0),
            num_rows: AtomicU32::new(0),
            num_items: AtomicU32::new(0),
            num_merges: AtomicU32::new(0),
            is_work_current: AtomicU32::new(1),
            row_start: zeroed(slots)?,
            row_num_pages: zeroed(slots)?,
            lengths: zeroed(slots)?,
            first_page_offsets: zeroed(slots)?,
            positions: zeroed(slots)?,
            generations: zeroed(slots)?,
            row_slots: zeroed(slots)?,
            page_ids: zeroed(slots * capacities.row_stride)?,
            work_items: zeroed(capacities.num_work_items * WorkItem::NUM_FIELDS)?,
            merge_rows: zeroed(slots * MergeRow::NUM_FIELDS)?,
        })
    }

    /// Opens a write; readers retry until the section is dropped. Takes the writer's word that there is no other.
    pub(super) fn write(&self) -> WriteSection<'_> {
        let sequence = own_u64(&self.sequence);
        // Pairs with the Acquire loads of the payload: a reader that sees any store of this section also sees the odd number.
        self.sequence.store(sequence.wrapping_add(1), Ordering::Release);
        WriteSection { resident: self, sequence }
    }
}

/// A write under way. Its end bumps the epoch and lets readers in.
pub(super) struct WriteSection<'a> {
    resident: &'a Resident,
    sequence: u64,
}

impl WriteSection<'_> {
    pub(super) fn bump_epoch(&self) {
        // Pairs with the Acquire load in `PlanReader`.
        self.resident.epoch.store(own_u64(&self.resident.epoch).wrapping_add(1), Ordering::Release);
    }
}

impl Drop for WriteSection<'_> {
    fn drop(&mut self) {
        // Pairs with the first Acquire load of the number in `PlanReader::try_snapshot`: who sees it sees the whole section.
        self.resident.sequence.store(self.sequence.wrapping_add(2), Ordering::Release);
    }
}

/// Stores a payload value inside a write section.
#[inline(always)]
pub(super) fn publish(cell: &AtomicI32, value: i32) {
    // Pairs with the Acquire loads in `PlanReader`: a reader that sees the value sees the odd sequence number before it.
    cell.store(value, Ordering::Release);
}

/// As [`publish`], for counts and generations.
#[inline(always)]
pub(super) fn publish_u32(cell: &AtomicU32, value: u32) {
    // Pairs with the Acquire loads in `PlanReader`, as above.
    cell.store(value, Ordering::Release);
}

/// Reads a value under `&DecodePlan`, where nobody stores.
#[inline(always)]
pub(super) fn own(cell: &AtomicI32) -> i32 {
    // Relaxed: the plan's borrow orders this load after the store.
    cell.load(Ordering::Relaxed)
}

/// As [`own`].
#[inline(always)]
pub(super) fn own_u32(cell: &AtomicU32) -> u32 {
    cell.load(Ordering::Relaxed)
}

/// As [`own`].
#[inline(always)]
pub(super) fn own_u64(cell: &AtomicU64) -> u64 {
    cell.load(Ordering::Relaxed)
}

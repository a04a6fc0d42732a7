//! Readers of a plan on other threads: a sequence lock without fences.
//!
//! The writer makes the sequence number odd, stores, and makes it even again, all Release. A reader loads the number, the
//! payload and the number again, all Acquire. If a payload load sees a store of a write under way, it also sees the odd number
//! or a later one, so the two numbers differ and the copy is thrown away. The writer never waits; a reader repeats. A torn
//! copy is only ever used to index with bounds checked.

use std::sync::Arc;

use super::config::Capacities;
use super::csr::Csr;
use super::resident::Resident;
use super::work::WorkItem;
use crate::ids::Slot;
use crate::primitive::{AtomicI32, Ordering};

/// A consistent copy of a plan's state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlanSnapshot {
    /// Number of edits before the copy.
    pub epoch: u64,
    /// `[batch]`: slots in row order.
    pub slots: Vec<Slot>,
    /// The batch's page tables, lengths and positions.
    pub csr: Csr,
    /// Items in use.
    pub work_items: Vec<WorkItem>,
    /// False if rows have come, gone or outgrown the bound since the items were made.
    pub is_work_current: bool,
}

/// A handle for readers. It keeps the arrays alive, and works, after its plan has been dropped.
#[derive(Clone)]
pub struct PlanReader {
    resident: Arc<Resident>,
    page_size: usize,
}

impl PlanReader {
    pub(super) fn new(resident: Arc<Resident>, capacities: &Capacities) -> Self {
        Self { resident, page_size: capacities.config.page_size }
    }

    #[cfg(not(paged_loom))]
    pub(super) fn resident(&self) -> &Resident {
        &self.resident
    }

    /// Number of edits so far.
    pub fn epoch(&self) -> u64 {
        // Pairs with the Release store in `WriteSection::bump_epoch`.
        self.resident.epoch.load(Ordering::Acquire)
    }

    /// Rows of the batch, at some moment during the call.
    pub fn num_rows(&self) -> usize {
        // Pairs with the Release stores in `publish_u32`.
        self.resident.num_rows.load(Ordering::Acquire) as usize
    }

    /// Copies the state, repeating while the writer is at work. Never delays the writer.
    pub fn snapshot(&self) -> PlanSnapshot {
        let backoff = crossbeam_utils::Backoff::new();
        loop {
            if let Some(snapshot) = self.try_snapshot() {
                return snapshot;
            }
            backoff.snooze();
        }
    }

    /// Copies the state, or returns `None` if the writer was at work meanwhile.
    pub fn try_snapshot(&self) -> Option<PlanSnapshot> {
        // Pairs with the Release store that ends a write section: all its stores are seen.
        let before = self.resident.sequence.load(Ordering::Acquire);
        if before % 2 == 1 {
            return None;
        }
        let snapshot = self.copy()?;
        // Pairs with the Release store that opens a write section, by way of the Acquire loads in `copy`.
        let after = self.resident.sequence.load(Ordering::Acquire);
        (before == after).then_some(snapshot)
    }

    /// Copies what there is; `None` if a torn index points nowhere.
    fn copy(&self) -> Option<PlanSnapshot> {
        let resident = &*self.resident;
        let mut snapshot = PlanSnapshot {
            epoch: self.epoch(),
            csr: Csr { indptr: vec![0], ..Csr::default() },
            // Pairs with the Release stores in `publish_u32`.
            is_work_current: resident.is_work_current.load(Ordering::Acquire) == 1,
            ..PlanSnapshot::default()
        };
        for cell in resident.row_slots.get(..self.num_rows())? {
            let index = load(cell);
            let slot = index as usize;
            // Pairs with the Release stores in `publish_u32`.
            let generation = resident.generations.get(slot)?.load(Ordering::Acquire);
            snapshot.slots.push(Slot { index: index as u32, generation });
            let (length, offset) = (load(&resident.lengths[slot]), load(&resident.first_page_offsets[slot]));
            let num_pages = (length as usize + offset as usize).div_ceil(self.page_size);
            let start = load(&resident.row_start[slot]) as usize;
            let pages = resident.page_ids.get(start..start + num_pages)?;
            let position = load(&resident.positions[slot]);
            snapshot.csr.push_row(pages.iter().map(load), self.page_size, length, offset, position);
        }
        // Pairs with the Release stores in `publish_u32`.
        let num_items = resident.num_items.load(Ordering::Acquire) as usize;
        for fields in
            resident.work_items.get(..num_items * WorkItem::NUM_FIELDS)?.chunks_exact(WorkItem::NUM_FIELDS)
        {
            snapshot.work_items.push(WorkItem {
                slot: load(&fields[0]),
                kv_begin: load(&fields[1]),
                kv_end: load(&fields[2]),
                out_row: load(&fields[3]),
                flags: load(&fields[4]),
            });
        }
        Some(snapshot)
    }
}

/// Loads a payload value.
fn load(cell: &AtomicI32) -> i32 {
    // Pairs with the Release stores in `publish`.
    cell.load(Ordering::Acquire)
}

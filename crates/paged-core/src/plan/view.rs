//! Borrowed views of the resident arrays.

use super::{DecodePlan, NO_ROW, PlanReader, RowView, own};
use crate::primitive::AtomicI32;

/// The resident arrays that can be shown as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanArray {
    /// `[max_slots]`: index of the row's first page in `PageIds`.
    RowStart,
    /// `[max_slots]`: pages held.
    RowNumPages,
    /// `[max_slots * row_stride]`
    PageIds,
    /// `[max_slots]`: tokens from the first page offset on.
    Lengths,
    /// `[max_slots]`
    FirstPageOffsets,
    /// `[max_slots]`: absolute position of the next token.
    Positions,
    /// `[max_slots]`, `num_rows` in use: slot of a batch row.
    RowSlots,
    /// `[num_work_items, 5]`: [`WorkItem`](super::WorkItem), unused ones 0.
    WorkItems,
    /// `[max_slots, 3]`: [`MergeRow`](super::MergeRow).
    MergeRows,
}

impl PlanReader {
    /// Address of a resident array and its number of i32 entries. It stays valid, and in place, as long as the reader or its
    /// plan lives; the plan's writer may change entries at any time.
    pub fn array(&self, array: PlanArray) -> (*const i32, usize) {
        let resident = self.resident();
        let cells = match array {
            PlanArray::RowStart => &resident.row_start,
            PlanArray::RowNumPages => &resident.row_num_pages,
            PlanArray::PageIds => &resident.page_ids,
            PlanArray::Lengths => &resident.lengths,
            PlanArray::FirstPageOffsets => &resident.first_page_offsets,
            PlanArray::Positions => &resident.positions,
            PlanArray::RowSlots => &resident.row_slots,
            PlanArray::WorkItems => &resident.work_items,
            PlanArray::MergeRows => &resident.merge_rows,
        };
        (cells.as_ptr().cast(), cells.len())
    }
}

impl DecodePlan {
    /// The row at a batch position, `None` beyond `num_rows`.
    pub fn row(&self, row: usize) -> Option<RowView<'_>> {
        self.rows.get(row).map(|&index| self.view(index))
    }

    /// The row in a slot of the table, `None` if the slot holds none.
    pub fn slot_row(&self, index: u32) -> Option<RowView<'_>> {
        (*self.slot_rows.get(index as usize)? != NO_ROW).then(|| self.view(index))
    }

    fn view(&self, index: u32) -> RowView<'_> {
        let (slot, resident) = (index as usize, &self.resident);
        RowView {
            slot: index,
            pages: still(self.held_pages(slot)),
            length: own(&resident.lengths[slot]) as usize,
            first_page_offset: own(&resident.first_page_offsets[slot]) as usize,
            position: own(&resident.positions[slot]) as usize,
        }
    }
}

/// Reads cells as plain integers.
fn still(cells: &[AtomicI32]) -> &[i32] {
    // SAFETY: `AtomicI32` has the size and alignment of `i32`. Only `&mut DecodePlan` stores into the resident arrays, and the
    // callers tie the result to a borrow of `&DecodePlan`; other threads only load, which does not race with plain reads.
    unsafe { std::slice::from_raw_parts(cells.as_ptr().cast(), cells.len()) }
}

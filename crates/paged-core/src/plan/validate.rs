//! Every invariant of a plan, in one place.

use super::resident::own;
use super::{DecodePlan, NO_ROW, WorkItem};
use crate::error::{Error, Result};

impl DecodePlan {
    /// Checks the row table, and the work list unless it waits for a new split. Costs time in pages and items.
    ///
    /// # Errors
    /// `InvalidPlan` with the first broken invariant.
    pub fn validate(&self) -> Result<()> {
        self.export_csr().view().validate(self.config().num_pages, self.config().page_size)?;
        let live = self.slot_rows.iter().filter(|&&row| row != NO_ROW).count();
        if live != self.rows.len() || live + self.free_slots.len() != self.config().max_slots {
            return Err(Error::invalid_plan(format!(
                "{} rows, {live} live slots, {} free slots of {}",
                self.rows.len(),
                self.free_slots.len(),
                self.config().max_slots
            )));
        }
        for (row, &index) in self.rows.iter().enumerate() {
            self.validate_row(row, index as usize)?;
        }
        let next_full = self.rows.iter().map(|&index| self.full_at[index as usize]).min();
        if next_full.is_some_and(|step| step < self.pace.next_full || step < self.pace.num_advances) {
            return Err(Error::invalid_plan(format!(
                "a row is full at step {next_full:?}: expected {} or later, now {}",
                self.pace.next_full, self.pace.num_advances
            )));
        }
        if self.is_work_current { self.validate_work() } else { Ok(()) }
    }

    fn validate_row(&self, row: usize, slot: usize) -> Result<()> {
        let resident = &*self.resident;
        let (start, pages) =
            (own(&resident.row_start[slot]) as usize, own(&resident.row_num_pages[slot]) as usize);
        let (length, offset) = (own(&resident.lengths[slot]), own(&resident.first_page_offsets[slot]));
        let base = slot * self.capacities.row_stride;
        let fits = start >= base && start + pages <= base + self.capacities.row_stride;
        let room = (pages * self.config().page_size) as i64 - i64::from(offset) - i64::from(length);
        let agrees = self.slot_rows[slot] as usize == row && own(&resident.row_slots[row]) as usize == slot;
        let noted = self.full_at[slot] as i64 - self.pace.num_advances as i64;
        if !fits || !agrees || room < 0 || room != noted {
            return Err(Error::invalid_plan(format!(
                "row {row} in slot {slot}: {pages} pages at {start}, length {length} from offset {offset}, room {noted}"
            )));
        }
        Ok(())
    }

    /// Every visible token in exactly one item, results in distinct rows.
    fn validate_work(&self) -> Result<()> {
        let window = self.config().window;
        if self.work.items.len() > self.capacities.num_work_items
            || self.work.row_items.len() != self.rows.len()
        {
            return Err(Error::invalid_plan(format!(
                "{} items for {} rows in a list of {}",
                self.work.items.len(),
                self.work.row_items.len(),
                self.capacities.num_work_items
            )));
        }
        let mut partial_rows = vec![false; self.work.num_partial_rows];
        for (row, range) in self.work.row_items.iter().enumerate() {
            let length = own(&self.resident.lengths[self.rows[row] as usize]) as usize;
            let mut covered = window.map_or(0, |window| length.saturating_sub(window));
            let items = &self.work.items[range.begin as usize..(range.begin + range.count) as usize];
            for item in items {
                let tokens = item.tokens(length, window);
                let in_place = if item.is_split() {
                    partial_rows
                        .get_mut(item.out_row as usize)
                        .is_some_and(|taken| !std::mem::replace(taken, true))
                } else {
                    items.len() == 1 && item.out_row as usize == row
                };
                let is_next = tokens.is_empty() || tokens.start == covered;
                if item.slot as u32 != self.rows[row]
                    || item.flags & WorkItem::VALID == 0
                    || !in_place
                    || !is_next
                {
                    return Err(Error::invalid_plan(format!(
                        "row {row}, covered up to {covered}: wrong {item:?}"
                    )));
                }
                covered = covered.max(tokens.end);
            }
            if covered != length || items.is_empty() {
                return Err(Error::invalid_plan(format!(
                    "row {row} of length {length} is covered up to {covered}"
                )));
            }
        }
        if partial_rows.contains(&false) {
            return Err(Error::invalid_plan("a partial row is not written"));
        }
        Ok(())
    }
}

//! Edits of the row table. Each validates first, then stores, and costs time in what changed: `admit` the pages admitted,
//! `append_page` one entry, `retire` the batch rows behind, `advance` one entry per row and array.

use std::ops::Range;

use super::resident::{own, own_u32, publish, publish_u32};
use super::{DecodePlan, NO_ROW, WorkItem};
use crate::error::{Error, Result};
use crate::geometry::MAX_INDEX;
use crate::ids::{PageId, Slot};

impl DecodePlan {
    /// Adds a row for a sequence that holds `pages` with `num_tokens` tokens from `first_page_offset` on. Pages beyond the
    /// last token are spare. `position` is the absolute position of the next token, `num_tokens` if not given.
    ///
    /// # Errors
    /// `PlanFull` without a free slot or if a row can't hold the pages; `InvalidArgument` for a page outside the pool, an
    /// offset not in the first page or not 0 without tokens, more tokens than the pages hold, or a position below
    /// `num_tokens`.
    pub fn admit(
        &mut self,
        pages: &[PageId],
        num_tokens: usize,
        first_page_offset: usize,
        position: Option<usize>,
    ) -> Result<Slot> {
        let page_size = self.config().page_size;
        let capacity = self.config().max_pages_per_slot;
        if pages.len() > capacity {
            return Err(Error::PlanFull { what: "pages of a row", needed: pages.len(), capacity });
        }
        for &page in pages {
            self.check_page("pages", page)?;
        }
        if first_page_offset >= page_size || (first_page_offset > 0 && num_tokens == 0) {
            return Err(Error::invalid(
                "first_page_offset",
                format!(
                    "expected less than page_size {page_size}, and 0 without tokens, got {first_page_offset}"
                ),
            ));
        }
        let held = pages.len() * page_size;
        if num_tokens > held - first_page_offset.min(held) {
            return Err(Error::invalid(
                "num_tokens",
                format!(
                    "{} pages of {page_size} from offset {first_page_offset} can't hold {num_tokens}",
                    pages.len()
                ),
            ));
        }
        let position = position.unwrap_or(num_tokens);
        if position < num_tokens || position >= MAX_INDEX {
            return Err(Error::invalid(
                "position",
                format!("expected {num_tokens}..{MAX_INDEX}, got {position}"),
            ));
        }
        let Some(index) = self.free_slots.pop() else {
            let capacity = self.config().max_slots;
            return Err(Error::PlanFull { what: "slots", needed: capacity + 1, capacity });
        };
        let slot = index as usize;
        let start = slot * self.capacities.row_stride;
        let room = held - first_page_offset - num_tokens;

        let resident = &*self.resident;
        let section = resident.write();
        for (cell, &page) in resident.page_ids[start..].iter().zip(pages) {
            publish(cell, page as i32);
        }
        publish(&resident.row_start[slot], start as i32);
        publish(&resident.row_num_pages[slot], pages.len() as i32);
        publish(&resident.lengths[slot], num_tokens as i32);
        publish(&resident.first_page_offsets[slot], first_page_offset as i32);
        publish(&resident.positions[slot], position as i32);
        publish(&resident.row_slots[self.rows.len()], index as i32);
        publish_u32(&resident.num_rows, self.rows.len() as u32 + 1);
        publish_u32(&resident.is_work_current, 0);
        section.bump_epoch();
        drop(section);

        self.slot_rows[slot] = self.rows.len() as u32;
        self.rows.push(index);
        self.row_versions[slot] += 1;
        self.start_pace(slot, room);
        self.max_position = self.max_position.max(position);
        self.is_work_current = false;
        Ok(self.live_slot(index))
    }

    /// Ends a row. The rows behind it move up by one.
    ///
    /// # Errors
    /// `StaleSlot`.
    pub fn retire(&mut self, slot: Slot) -> Result<()> {
        let row = self.row_of(slot)?;
        let index = slot.index as usize;
        self.rows.remove(row);

        let resident = &*self.resident;
        let section = resident.write();
        for (behind, &moved) in self.rows.iter().enumerate().skip(row) {
            self.slot_rows[moved as usize] = behind as u32;
            publish(&resident.row_slots[behind], moved as i32);
        }
        publish(&resident.row_num_pages[index], 0);
        publish(&resident.lengths[index], 0);
        publish(&resident.first_page_offsets[index], 0);
        publish(&resident.positions[index], 0);
        publish_u32(&resident.generations[index], slot.generation.wrapping_add(1));
        publish_u32(&resident.num_rows, self.rows.len() as u32);
        publish_u32(&resident.is_work_current, 0);
        section.bump_epoch();
        drop(section);

        self.slot_rows[index] = NO_ROW;
        self.free_slots.push(slot.index);
        self.is_work_current = false;
        self.pace.num_edits += 1;
        self.pace.num_row_changes += 1;
        Ok(())
    }

    /// Adds a page at the end of a row.
    ///
    /// # Errors
    /// `StaleSlot`, `InvalidArgument` for a page outside the pool, `PlanFull` if the row holds `max_pages_per_slot`.
    pub fn append_page(&mut self, slot: Slot, page: PageId) -> Result<()> {
        self.row_of(slot)?;
        self.check_page("page", page)?;
        let index = slot.index as usize;
        let num_pages = own(&self.resident.row_num_pages[index]) as usize;
        let capacity = self.config().max_pages_per_slot;
        if num_pages >= capacity {
            return Err(Error::PlanFull { what: "pages of a row", needed: num_pages + 1, capacity });
        }
        let resident = &*self.resident;
        let base = index * self.capacities.row_stride;
        let mut start = own(&resident.row_start[index]) as usize;

        let section = resident.write();
        if start + num_pages == base + self.capacities.row_stride {
            // The head has moved up to here. Moving the row back costs its pages once in as many appends.
            for offset in 0..num_pages {
                publish(&resident.page_ids[base + offset], own(&resident.page_ids[start + offset]));
            }
            publish(&resident.row_start[index], base as i32);
            self.row_versions[index] += 1;
            start = base;
        }
        publish(&resident.page_ids[start + num_pages], page as i32);
        publish(&resident.row_num_pages[index], num_pages as i32 + 1);
        section.bump_epoch();
        drop(section);

        self.full_at[index] += self.capacities.config.page_size as u64;
        self.pace.num_edits += 1;
        Ok(())
    }

    /// Puts another page at a place of a row, after a copy-on-write. `page_index` counts from the row's first held page.
    ///
    /// # Errors
    /// `StaleSlot`, `InvalidArgument` for a page outside the pool or a place that the row does not have.
    pub fn replace_page(&mut self, slot: Slot, page_index: usize, page: PageId) -> Result<()> {
        self.row_of(slot)?;
        self.check_page("page", page)?;
        let pages = self.held_pages(slot.index as usize);
        let Some(cell) = pages.get(page_index) else {
            return Err(Error::invalid(
                "page_index",
                format!("the row holds {} pages, got {page_index}", pages.len()),
            ));
        };
        let section = self.resident.write();
        publish(cell, page as i32);
        section.bump_epoch();
        drop(section);
        self.row_versions[slot.index as usize] += 1;
        self.pace.num_edits += 1;
        Ok(())
    }

    /// Drops the first `num_pages` pages of a row; its first token is then at `first_page_offset` of the next page. The
    /// sequence's position stays.
    ///
    /// # Errors
    /// `StaleSlot`; `InvalidArgument` if the row would get tokens back, lose tokens that it does not have, or lose tokens that
    /// its next token still sees under the plan's window.
    pub fn retire_head_pages(
        &mut self,
        slot: Slot,
        num_pages: usize,
        first_page_offset: usize,
    ) -> Result<()> {
        let row = self.row_of(slot)?;
        let index = slot.index as usize;
        let resident = &*self.resident;
        let page_size = self.config().page_size;
        let held = own(&resident.row_num_pages[index]) as usize;
        let length = own(&resident.lengths[index]) as usize;
        let old_offset = own(&resident.first_page_offsets[index]) as usize;
        if num_pages > held {
            return Err(Error::invalid("num_pages", format!("the row holds {held} pages, got {num_pages}")));
        }
        let kept_pages = held - num_pages;
        if first_page_offset >= page_size || (kept_pages == 0 && first_page_offset > 0) {
            return Err(Error::invalid(
                "first_page_offset",
                format!(
                    "expected less than page_size {page_size}, and 0 without pages, got {first_page_offset}"
                ),
            ));
        }
        let removed = (num_pages * page_size + first_page_offset).checked_sub(old_offset);
        // The next token and the window - 1 tokens before it.
        let kept_least = self.config().window.map_or(0, |window| length.min(window - 1));
        let Some(removed) = removed.filter(|&removed| removed <= length - kept_least) else {
            return Err(Error::invalid(
                "num_pages",
                format!(
                    "{num_pages} pages up to offset {first_page_offset} leave a row of {length} tokens from offset \
                     {old_offset} with fewer than {kept_least} or more than {length} tokens"
                ),
            ));
        };
        let kept = length - removed;
        if kept == 0 && first_page_offset > 0 {
            return Err(Error::invalid(
                "first_page_offset",
                format!("expected 0 without tokens, got {first_page_offset}"),
            ));
        }

        let section = resident.write();
        publish(&resident.row_start[index], own(&resident.row_start[index]) + num_pages as i32);
        publish(&resident.row_num_pages[index], kept_pages as i32);
        publish(&resident.lengths[index], kept as i32);
        publish(&resident.first_page_offsets[index], first_page_offset as i32);
        if self.is_work_current {
            // Items count from the row's first token, which has moved.
            let range = self.work.row_items[row];
            for item in range.begin as usize..(range.begin + range.count) as usize {
                let entry = &mut self.work.items[item];
                entry.kv_begin = entry.kv_begin.saturating_sub(removed as i32).max(0);
                if entry.kv_end != WorkItem::OPEN_END {
                    entry.kv_end = entry.kv_end.saturating_sub(removed as i32).max(0);
                }
                publish(&resident.work_items[item * WorkItem::NUM_FIELDS + 1], entry.kv_begin);
                publish(&resident.work_items[item * WorkItem::NUM_FIELDS + 2], entry.kv_end);
            }
        }
        section.bump_epoch();
        drop(section);
        self.pace.num_edits += 1;
        Ok(())
    }

    /// Adds one token to every row: lengths and positions grow by one.
    ///
    /// # Errors
    /// `InvalidPlan` if a row has no page for its next token or a position would exceed 2^31 - 1; no row is changed then.
    pub fn advance(&mut self) -> Result<()> {
        self.check_advance()?;
        let resident = &*self.resident;
        let section = resident.write();
        for &index in &self.rows {
            let index = index as usize;
            let (length, position) = (&resident.lengths[index], &resident.positions[index]);
            publish(length, own(length) + 1);
            publish(position, own(position) + 1);
        }
        self.pace.num_advances += 1;
        self.max_position += 1;
        self.num_steps += 1;
        if self.is_work_current && !self.is_balanced() {
            self.is_work_current = false;
            publish_u32(&resident.is_work_current, 0);
        }
        section.bump_epoch();
        Ok(())
    }

    /// What [`advance`](Self::advance) would say; the rows stay as they are.
    ///
    /// # Errors
    /// As for `advance`.
    pub(crate) fn check_advance(&mut self) -> Result<()> {
        if self.pace.num_advances >= self.pace.next_full {
            self.find_next_full()?;
        }
        if self.max_position >= MAX_INDEX {
            self.find_max_position()?;
        }
        Ok(())
    }

    /// The bound on the step at which a row is full has been reached: perhaps by a row that is gone or has got a page.
    #[cold]
    fn find_next_full(&mut self) -> Result<()> {
        let full_at = self.rows.iter().map(|&index| self.full_at[index as usize]);
        self.pace.next_full = full_at.min().unwrap_or(u64::MAX);
        if self.pace.num_advances < self.pace.next_full {
            return Ok(());
        }
        let is_full = |index: &u32| self.room(*index as usize) == 0;
        let row = self.rows.iter().position(is_full).unwrap_or(0);
        let num_full = self.rows.iter().filter(|index| is_full(index)).count();
        let length = self.rows.get(row).map_or(0, |&index| own(&self.resident.lengths[index as usize]));
        Err(Error::invalid_plan(format!(
            "row {row} has no page for its next token at length {length} ({num_full} such rows): append_page first"
        )))
    }

    /// The bound on positions has reached the limit: perhaps through a row that is gone.
    #[cold]
    fn find_max_position(&mut self) -> Result<()> {
        let positions = self.rows.iter().map(|&index| own(&self.resident.positions[index as usize]) as usize);
        self.max_position = positions.max().unwrap_or(0);
        if self.max_position >= MAX_INDEX {
            return Err(Error::invalid_plan(format!("a row is at position {MAX_INDEX}, the largest")));
        }
        Ok(())
    }

    fn check_page(&self, argument: &'static str, page: PageId) -> Result<()> {
        let num_pages = self.config().num_pages;
        if page as usize >= num_pages {
            return Err(Error::invalid(argument, format!("expected page ids in 0..{num_pages}, got {page}")));
        }
        Ok(())
    }

    /// Places in `page_ids` of the pages of a slot that hold tokens.
    pub(super) fn used_pages(&self, index: usize) -> Range<usize> {
        let start = own(&self.resident.row_start[index]) as usize;
        let tokens = own(&self.resident.first_page_offsets[index]) + own(&self.resident.lengths[index]);
        start..start + (tokens as usize).div_ceil(self.config().page_size)
    }

    /// Removes every row; to be called inside a write section.
    pub(super) fn clear(&mut self) {
        let resident = &*self.resident;
        for &index in &self.rows {
            let generation = &resident.generations[index as usize];
            publish_u32(generation, own_u32(generation).wrapping_add(1));
            publish(&resident.row_num_pages[index as usize], 0);
            publish(&resident.lengths[index as usize], 0);
            publish(&resident.first_page_offsets[index as usize], 0);
            publish(&resident.positions[index as usize], 0);
            self.slot_rows[index as usize] = NO_ROW;
        }
        publish_u32(&resident.num_rows, 0);
        publish_u32(&resident.is_work_current, 0);
        self.rows.clear();
        self.free_slots.clear();
        self.free_slots.extend((0..self.capacities.config.max_slots as u32).rev());
        (self.max_position, self.is_work_current) = (0, false);
        self.pace.next_full = u64::MAX;
        self.pace.num_edits += 1;
        self.pace.num_row_changes += 1;
    }
}

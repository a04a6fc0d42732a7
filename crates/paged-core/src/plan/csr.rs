//! Compact CSR: the exchange form of a batch's page tables.

use std::sync::Arc;

use super::resident::{own, publish, publish_u32};
use super::{DecodePlan, PlanConfig};
use crate::error::{Error, Result};
use crate::geometry::{HeadGeometry, MAX_INDEX};
use crate::ids::Slot;

/// CSR arrays that belong to somebody else. `indices` may be longer than `indptr` says; the tail is never read.
#[derive(Debug, Clone, Copy)]
pub struct CsrView<'a> {
    /// `[batch + 1]`
    pub indptr: &'a [i32],
    /// `[indptr[batch]]` page ids
    pub indices: &'a [i32],
    /// `[batch]`
    pub last_page_len: &'a [i32],
    /// `[batch]`, zeros if `None`
    pub first_page_offset: Option<&'a [i32]>,
}

/// CSR arrays of a batch, in row order, with the lengths and positions that belong to them.
///
/// `length = (pages - 1) * page_size + last_page_len - first_page_offset`; a row without pages has length 0 and vice versa.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Csr {
    /// `[batch + 1]`
    pub indptr: Vec<i32>,
    /// `[indptr[batch]]` page ids
    pub indices: Vec<i32>,
    /// `[batch]`: tokens in the last page, `1..=page_size`; 0 without pages
    pub last_page_len: Vec<i32>,
    /// `[batch]`: entries of the first page before the first token
    pub first_page_offset: Vec<i32>,
    /// `[batch]`
    pub lengths: Vec<i32>,
    /// `[batch]`: absolute position of the next token
    pub positions: Vec<i32>,
}

impl Csr {
    /// The arrays as an importer wants them.
    pub fn view(&self) -> CsrView<'_> {
        CsrView {
            indptr: &self.indptr,
            indices: &self.indices,
            last_page_len: &self.last_page_len,
            first_page_offset: Some(&self.first_page_offset),
        }
    }

    /// Appends a row of used pages.
    pub(super) fn push_row(
        &mut self,
        pages: impl Iterator<Item = i32>,
        page_size: usize,
        length: i32,
        first_page_offset: i32,
        position: i32,
    ) {
        if self.indptr.is_empty() {
            self.indptr.push(0);
        }
        let end = i64::from(first_page_offset) + i64::from(length);
        self.indices.extend(pages);
        self.indptr.push(self.indices.len() as i32);
        self.last_page_len.push(if end == 0 { 0 } else { ((end - 1) % page_size as i64 + 1) as i32 });
        self.first_page_offset.push(first_page_offset);
        self.lengths.push(length);
        self.positions.push(position);
    }
}

impl CsrView<'_> {
    /// Rows of the batch, from the length of `last_page_len`.
    pub fn num_rows(&self) -> usize {
        self.last_page_len.len()
    }

    /// Most pages that a row of valid arrays has.
    pub fn max_row_pages(&self) -> usize {
        self.indptr.windows(2).map(|pair| pair[1].saturating_sub(pair[0]).max(0) as usize).max().unwrap_or(0)
    }

    /// Checks every invariant of the form against a pool of `num_pages` pages of `page_size` tokens.
    ///
    /// # Errors
    /// `InvalidPlan` with the array, the row and the value.
    pub fn validate(&self, num_pages: usize, page_size: usize) -> Result<()> {
        let rows = self.num_rows();
        let offsets_len = self.first_page_offset.map_or(rows, <[i32]>::len);
        if self.indptr.len() != rows + 1 || offsets_len != rows {
            return Err(Error::invalid_plan(format!(
                "indptr has {} entries, last_page_len {rows}, first_page_offset {offsets_len}: expected batch + 1, batch, batch",
                self.indptr.len()
            )));
        }
        if self.indptr[0] != 0 {
            return Err(Error::invalid_plan(format!("indptr[0] is {}, expected 0", self.indptr[0])));
        }
        for (row, pair) in self.indptr.windows(2).enumerate() {
            if pair[1] < pair[0] {
                return Err(Error::invalid_plan(format!(
                    "indptr decreases at row {row}: {} to {}",
                    pair[0], pair[1]
                )));
            }
        }
        let used = self.indptr[rows] as usize;
        if used > self.indices.len() {
            return Err(Error::invalid_plan(format!(
                "indptr ends at {used}, indices has {} entries",
                self.indices.len()
            )));
        }
        for row in 0..rows {
            self.validate_row(row, page_size)?;
        }
        let outside = self.indices[..used].iter().position(|&page| page < 0 || page as usize >= num_pages);
        if let Some(at) = outside {
            return Err(Error::invalid_plan(format!(
                "indices[{at}] is {}, expected 0..{num_pages}",
                self.indices[at]
            )));
        }
        Ok(())
    }

    fn validate_row(&self, row: usize, page_size: usize) -> Result<()> {
        let (num_pages, last, offset) = self.row(row);
        let page_size = page_size as i64;
        let breach = |what: &str| {
            Err(Error::invalid_plan(format!(
                "row {row} has {num_pages} pages of {page_size}, last_page_len {last}, first_page_offset {offset}: {what}"
            )))
        };
        if num_pages == 0 {
            return if last == 0 && offset == 0 { Ok(()) } else { breach("expected 0 and 0 without pages") };
        }
        if last < 1 || last > page_size {
            return breach("last_page_len outside 1..=page_size");
        }
        if offset < 0 || offset >= page_size {
            return breach("first_page_offset outside 0..page_size");
        }
        let length = (num_pages - 1) * page_size + last - offset;
        if length < 1 || length >= MAX_INDEX as i64 {
            return breach("pages without a token, or too many tokens");
        }
        Ok(())
    }

    /// (pages, last_page_len, first_page_offset) of a row.
    fn row(&self, row: usize) -> (i64, i64, i64) {
        let num_pages = i64::from(self.indptr[row + 1]) - i64::from(self.indptr[row]);
        let offset = self.first_page_offset.map_or(0, |offsets| offsets[row]);
        (num_pages, i64::from(self.last_page_len[row]), i64::from(offset))
    }

    fn length(&self, row: usize, page_size: usize) -> usize {
        match self.row(row) {
            (0, ..) => 0,
            (num_pages, last, offset) => ((num_pages - 1) * page_size as i64 + last - offset) as usize,
        }
    }

    fn pages(&self, row: usize) -> &[i32] {
        &self.indices[self.indptr[row] as usize..self.indptr[row + 1] as usize]
    }
}

impl DecodePlan {
    /// Builds a plan from foreign arrays, which are copied. Each position is the row's length.
    ///
    /// `config.max_slots` and `max_pages_per_slot` are raised to what the arrays need.
    ///
    /// # Errors
    /// `InvalidPlan` for arrays that break an invariant, and as [`DecodePlan::new`].
    pub fn from_csr(csr: CsrView<'_>, mut config: PlanConfig) -> Result<Self> {
        csr.validate(config.num_pages, config.page_size)?;
        config.max_slots = config.max_slots.max(csr.num_rows());
        config.max_pages_per_slot = config.max_pages_per_slot.max(csr.max_row_pages());
        let mut plan = Self::new(config)?;
        plan.rebuild(csr, None)?;
        Ok(plan)
    }

    /// Replaces all rows by those of a batch and divides it. `positions`, `[batch]`, are the lengths if not given.
    ///
    /// # Errors
    /// `InvalidPlan` for arrays that break an invariant, `PlanFull` if they exceed the plan's capacities. The plan is unchanged
    /// then.
    pub fn rebuild(&mut self, csr: CsrView<'_>, positions: Option<&[i32]>) -> Result<Vec<Slot>> {
        let (page_size, capacity) = (self.config().page_size, self.config().max_pages_per_slot);
        let rows = csr.num_rows();
        csr.validate(self.config().num_pages, page_size)?;
        if rows > self.config().max_slots {
            return Err(Error::PlanFull { what: "slots", needed: rows, capacity: self.config().max_slots });
        }
        if csr.max_row_pages() > capacity {
            return Err(Error::PlanFull { what: "pages of a row", needed: csr.max_row_pages(), capacity });
        }
        if let Some(positions) = positions {
            if positions.len() != rows {
                return Err(Error::invalid_plan(format!(
                    "positions has {} entries, expected {rows}",
                    positions.len()
                )));
            }
            for (row, &position) in positions.iter().enumerate() {
                let length = csr.length(row, page_size);
                if position < length as i32 || position as usize >= MAX_INDEX {
                    return Err(Error::invalid_plan(format!(
                        "row {row} of length {length} is at position {position}"
                    )));
                }
            }
        }
        let resident = Arc::clone(&self.resident);
        let section = resident.write();
        self.clear();
        let slots = (0..rows).map(|row| self.import_row(csr, row, positions)).collect();
        section.bump_epoch();
        drop(section);
        self.ensure_work_list();
        Ok(slots)
    }

    /// Adds a valid row; to be called inside a write section, with a slot free.
    fn import_row(&mut self, csr: CsrView<'_>, row: usize, positions: Option<&[i32]>) -> Slot {
        let page_size = self.config().page_size;
        let index = self.free_slots.pop().unwrap_or_default();
        let slot = index as usize;
        let start = slot * self.capacities.row_stride;
        let (pages, length) = (csr.pages(row), csr.length(row, page_size));
        let position = positions.map_or(length, |positions| positions[row] as usize);
        let offset = csr.row(row).2 as usize;
        let room = pages.len() * page_size - offset - length;

        let resident = &*self.resident;
        for (cell, &page) in resident.page_ids[start..].iter().zip(pages) {
            publish(cell, page);
        }
        publish(&resident.row_start[slot], start as i32);
        publish(&resident.row_num_pages[slot], pages.len() as i32);
        publish(&resident.lengths[slot], length as i32);
        publish(&resident.first_page_offsets[slot], offset as i32);
        publish(&resident.positions[slot], position as i32);
        publish(&resident.row_slots[row], index as i32);
        publish_u32(&resident.num_rows, row as u32 + 1);

        self.slot_rows[slot] = row as u32;
        self.rows.push(index);
        self.row_versions[slot] += 1;
        self.start_pace(slot, room);
        self.max_position = self.max_position.max(position);
        self.live_slot(index)
    }

    /// Copies the batch into compact arrays: the pages that hold tokens, without spare ones, in row order.
    pub fn export_csr(&self) -> Csr {
        let resident = &*self.resident;
        let mut csr = Csr { indptr: vec![0], ..Csr::default() };
        for &index in &self.rows {
            let slot = index as usize;
            csr.push_row(
                resident.page_ids[self.used_pages(slot)].iter().map(own),
                self.config().page_size,
                own(&resident.lengths[slot]),
                own(&resident.first_page_offsets[slot]),
                own(&resident.positions[slot]),
            );
        }
        csr
    }
}

/// A configuration for imported arrays: room for a row to double before its plan is full.
pub fn import_config(
    csr: &CsrView<'_>,
    num_pages: usize,
    page_size: usize,
    heads: HeadGeometry,
) -> PlanConfig {
    const SPARE_PAGES: usize = 64;
    let max_pages = csr.max_row_pages();
    let limit = (MAX_INDEX - 1) / page_size.max(1);
    let capacity = (max_pages + max_pages.max(SPARE_PAGES)).min(limit);
    PlanConfig::new(csr.num_rows().max(1), capacity, num_pages, page_size, heads)
}

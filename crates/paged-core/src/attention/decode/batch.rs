//! What a decode launch works on: rows of pages and the ranges they are split into.

use crate::attention::pages::Pages;
use crate::attention::sequence::PagedSequence;
use crate::error::{Error, Result};
use crate::plan::DecodePlan;

/// A range of tokens of one row, counted from the row's first token. An `end` beyond the row means its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkItem {
    /// Row of the batch.
    pub row: usize,
    /// First token.
    pub begin: usize,
    /// One past the last token.
    pub end: usize,
}

/// The rows of a decode step and the work list that covers each of their tokens once. Items are started in order.
#[derive(Clone, Debug, Default)]
pub struct DecodeBatch<'a> {
    /// `num_rows` sequences; the query of a row is its last token.
    pub rows: Vec<PagedSequence<'a>>,
    /// Work list. Items of one row are merged in the order of the list.
    pub items: Vec<WorkItem>,
}

/// A checked item, trimmed to the window.
#[derive(Clone, Copy)]
pub(crate) struct Range {
    pub row: usize,
    /// Counted from entry 0 of the row's first page.
    pub begin: usize,
    pub end: usize,
}

/// The work of a launch.
pub(crate) struct Work {
    /// Items that hold visible tokens, in the order of the list.
    pub ranges: Vec<Range>,
    /// Number of `ranges` per row.
    pub num_ranges: Vec<u32>,
    /// Visible tokens of all rows.
    pub num_tokens: usize,
}

impl<'a> DecodeBatch<'a> {
    /// One item per row.
    pub fn unsplit(rows: Vec<PagedSequence<'a>>) -> Self {
        let items = (0..rows.len()).map(|row| WorkItem { row, begin: 0, end: usize::MAX }).collect();
        Self { rows, items }
    }

    /// The rows and the work list of a plan.
    ///
    /// # Errors
    /// `InvalidPlan` if the plan's work list is older than its rows.
    pub fn from_plan(plan: &'a DecodePlan) -> Result<Self> {
        let items = plan.work()?.items;
        let mut batch =
            Self { rows: Vec::with_capacity(plan.num_rows()), items: Vec::with_capacity(items.len()) };
        let mut row_of_slot = vec![usize::MAX; plan.config().max_slots];
        for row in (0..plan.num_rows()).filter_map(|row| plan.row(row)) {
            row_of_slot[row.slot as usize] = batch.rows.len();
            let (page_ids, first_page_offset, num_tokens) = (row.pages, row.first_page_offset, row.length);
            batch.rows.push(PagedSequence { page_ids, first_page_offset, num_tokens });
        }
        for item in items {
            let row = row_of_slot[item.slot as usize];
            batch.items.push(WorkItem { row, begin: item.kv_begin as usize, end: item.kv_end as usize });
        }
        Ok(batch)
    }

    pub(crate) fn check(&self, pages: &Pages) -> Result<()> {
        self.rows.iter().try_for_each(|row| row.check(pages))
    }

    pub(crate) fn expect_a_token_per_row(&self, argument: &'static str) -> Result<()> {
        match self.rows.iter().position(|row| row.num_tokens == 0) {
            Some(row) => Err(Error::invalid(argument, format!("row {row} holds no token to write to"))),
            None => Ok(()),
        }
    }

    /// `(row, page, slot)` of the last token of each row. The batch was checked, and each row has a token.
    pub(crate) fn last_places(&self, page_size: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        self.rows.iter().enumerate().flat_map(move |(row, sequence)| {
            sequence.places_of_last(1, page_size).map(move |(_, page, slot)| (row, page, slot))
        })
    }

    /// Trims the items to the last `window` tokens and checks that they cover as many tokens as are visible.
    pub(crate) fn work(&self, window: usize) -> Result<Work> {
        let mut work = Work {
            ranges: Vec::with_capacity(self.items.len()),
            num_ranges: vec![0; self.rows.len()],
            num_tokens: self
                .rows
                .iter()
                .fold(0, |sum: usize, row| sum.saturating_add(row.num_tokens.min(window))),
        };
        let mut num_covered = 0_usize;
        for item in &self.items {
            let Some(row) = self.rows.get(item.row) else {
                let (row, rows) = (item.row, self.rows.len());
                return Err(Error::invalid_plan(format!("work item of row {row}, the batch has {rows}")));
            };
            let begin = item.begin.max(row.num_tokens.saturating_sub(window));
            let end = item.end.min(row.num_tokens);
            if begin < end {
                let offset = row.first_page_offset;
                work.ranges.push(Range { row: item.row, begin: offset + begin, end: offset + end });
                work.num_ranges[item.row] += 1;
                num_covered = num_covered.saturating_add(end - begin);
            }
        }
        if num_covered != work.num_tokens {
            let visible = work.num_tokens;
            return Err(Error::invalid_plan(format!(
                "work items cover {num_covered} of {visible} visible tokens"
            )));
        }
        Ok(work)
    }
}

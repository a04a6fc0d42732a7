//! The CUDA device form of the work list: workers that stream over equal stretches of the batch (ADR 0005).
//!
//! Rows are laid end to end, longest first, and cut into one stretch a worker at multiples of [`STREAM_QUANTUM_TOKENS`]. A cut
//! within 2 % of a stretch of a row's end moves there, which saves a merge. Worker w runs items w, w + `num_workers`, ... up
//! to the first one that is not valid. The cuts are those of `kernels_cuda.balanced_work_list`.

use std::cmp::Reverse;

use super::config::MAX_WORK_ITEMS;
use super::split::{RowExtent, SplitResult, visible_begin};
use super::work::WorkItem;
use super::{DecodePlan, row_extent};
use crate::error::{Error, Result};
use crate::geometry::check_count;

/// Tokens between possible cuts, counted from the start of a row's first page: what all warps of a block consume in one turn.
pub const STREAM_QUANTUM_TOKENS: usize = 128;

/// A list counts as balanced until a worker has this many times the longest stretch of the fresh list, grown by the mean growth
/// of a worker (numerator, denominator), and half a quantum.
pub const STREAM_IMBALANCE_BOUND: (usize, usize) = (17, 16);

/// One stretch of one row, for every KV head. Also one row of the device array, `[num_items, 8]` i32.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamItem {
    /// Row of the resident table.
    pub slot: i32,
    /// First token, counted from the row's token at `first_page_offset`.
    pub kv_begin: i32,
    /// End of the tokens; under [`OPEN_END`](Self::OPEN_END) the row's length when the list was made.
    pub kv_end: i32,
    /// [`VALID`](Self::VALID), [`OPEN_END`](Self::OPEN_END).
    pub flags: i32,
    /// Batch row.
    pub out_row: i32,
    /// Index among the row's items.
    pub split: i32,
    /// Items of the row; 1: the output is written directly.
    pub num_splits: i32,
    /// Row of the workspace that the partial result goes to; a row's are consecutive. Without meaning if `num_splits` is 1.
    pub partial_row: i32,
}

impl StreamItem {
    /// The item is in use; every field of an unused item is 0.
    pub const VALID: i32 = 1;
    /// The row's last item: it ends at the row's length on the device.
    pub const OPEN_END: i32 = 2;
    /// Fields of an item in the device array.
    pub const NUM_FIELDS: usize = 8;

    /// The item as a row of the device array.
    pub const fn fields(&self) -> [i32; Self::NUM_FIELDS] {
        [
            self.slot,
            self.kv_begin,
            self.kv_end,
            self.flags,
            self.out_row,
            self.split,
            self.num_splits,
            self.partial_row,
        ]
    }
}

/// What [`DecodePlan::stream_items`] gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamList {
    /// `[num_items]`, unused ones 0.
    pub items: Vec<StreamItem>,
    /// Workers per KV head.
    pub num_workers: usize,
    /// Partial rows in use: less than `2 * num_workers`, or `num_work_items` of the plan at most if it is batch invariant.
    pub num_partial_rows: usize,
    /// Steps of [`advance`](DecodePlan::advance) for which the list is as good as a new one; a batch-invariant plan needs a
    /// new one after them. `usize::MAX` stands for any number.
    pub num_steps: usize,
}

/// A row as whole quanta `first..first + count`, from the start of its first page.
struct Stretch {
    first: usize,
    count: usize,
}

/// Consecutive quanta of a row, counted from its first visible one, that one worker takes.
struct Piece {
    row: usize,
    worker: usize,
    begin: usize,
    end: usize,
}

impl DecodePlan {
    /// Divides the batch as it is now among `num_workers` workers per KV head, in the CUDA kernel's form. The list covers
    /// every visible token once, whatever the rows grow to, until a row comes, goes or loses head pages.
    ///
    /// A batch-invariant plan keeps the cuts of its own work list: fixed chunks at absolute positions.
    ///
    /// # Errors
    /// `InvalidArgument` if `num_items` is less than the batch takes. `None` is enough for every batch of the plan.
    pub fn stream_items(&self, num_workers: usize, num_items: Option<usize>) -> Result<StreamList> {
        check_count("num_workers", num_workers, MAX_WORK_ITEMS)?;
        let depth = if self.config().batch_invariant {
            self.num_work_items().div_ceil(num_workers)
        } else {
            // A worker may get all short rows that a long one leaves over.
            self.config().max_slots
        };
        let num_items = num_items.unwrap_or_else(|| depth.saturating_mul(num_workers).min(MAX_WORK_ITEMS));
        check_count("num_items", num_items, MAX_WORK_ITEMS)?;
        let mut list = self.used_stream_items(num_workers, num_items)?;
        list.items.resize(num_items, StreamItem::default());
        Ok(list)
    }

    /// As [`stream_items`](Self::stream_items), without the unused items behind the last used one.
    pub(super) fn used_stream_items(&self, num_workers: usize, num_items: usize) -> Result<StreamList> {
        let rows: Vec<_> = self.rows.iter().map(|&index| row_extent(&self.resident, index)).collect();
        let list = if self.config().batch_invariant {
            self.fixed_stream(&rows, num_workers)
        } else {
            balanced_stream(&rows, num_workers, self.config().window, self.config().num_splits)
        };
        if list.items.len() > num_items {
            let needed = list.items.len();
            return Err(Error::invalid(
                "num_items",
                format!("expected {needed} or more for this batch, got {num_items}"),
            ));
        }
        Ok(list)
    }

    /// The chunks of `batch_invariant` mode, dealt to the workers in turn: they are about equal, longest rows first.
    fn fixed_stream(&self, rows: &[RowExtent], num_workers: usize) -> StreamList {
        let mut split = SplitResult::default();
        split.split(rows, &self.capacities);
        let mut items = vec![StreamItem::default(); split.items.len()];
        for (row, range) in split.row_items.iter().enumerate() {
            for place in 0..range.count {
                let index = (range.begin + place) as usize;
                let WorkItem { slot, kv_begin, kv_end, out_row, .. } = split.items[index];
                let is_last = place + 1 == range.count;
                items[index] = StreamItem {
                    slot,
                    kv_begin,
                    kv_end: if is_last { rows[row].length as i32 } else { kv_end },
                    flags: StreamItem::VALID | if is_last { StreamItem::OPEN_END } else { 0 },
                    out_row: row as i32,
                    split: place as i32,
                    num_splits: range.count as i32,
                    partial_row: if range.count > 1 { out_row } else { 0 },
                };
            }
        }
        let (num_partial_rows, num_steps) = (split.num_partial_rows, split.num_valid_steps);
        StreamList { items, num_workers, num_partial_rows, num_steps }
    }
}

fn balanced_stream(
    rows: &[RowExtent],
    num_workers: usize,
    window: Option<usize>,
    num_splits: Option<usize>,
) -> StreamList {
    let stretches: Vec<_> = rows.iter().map(|row| stretch(row, window)).collect();
    let pieces = cut(&stretches, num_workers, num_splits.unwrap_or(usize::MAX));

    let mut counts = vec![0; rows.len()];
    for piece in &pieces {
        counts[piece.row] += 1;
    }
    let mut num_partial_rows = 0;
    let partial_begins: Vec<_> = counts
        .iter()
        .map(|&count| {
            let begin = num_partial_rows;
            num_partial_rows += if count > 1 { count } else { 0 };
            begin
        })
        .collect();

    let mut seen = vec![0; rows.len()];
    let mut growth = Growth::default();
    let mut items = Vec::new();
    for mine in pieces.chunk_by(|left, right| left.worker == right.worker) {
        growth.next_worker();
        let mut records = Vec::with_capacity(mine.len());
        for piece in mine {
            let (row, extent) = (piece.row, &rows[piece.row]);
            let border = |quantum: usize| {
                (stretches[row].first + quantum) * STREAM_QUANTUM_TOKENS - extent.first_page_offset
            };
            let begin = if piece.begin == 0 { visible_begin(extent, window) } else { border(piece.begin) };
            let is_last = piece.end == stretches[row].count;
            let end = if is_last { extent.length } else { border(piece.end) };
            growth.add(end - begin, is_last);
            records.push(StreamItem {
                slot: extent.slot as i32,
                kv_begin: begin as i32,
                kv_end: end as i32,
                flags: StreamItem::VALID | if is_last { StreamItem::OPEN_END } else { 0 },
                out_row: row as i32,
                split: seen[row],
                num_splits: counts[row] as i32,
                partial_row: if counts[row] > 1 { partial_begins[row] as i32 + seen[row] } else { 0 },
            });
            seen[row] += 1;
        }
        // Shared rows first: their merge then happens while the block still has work in flight.
        records.sort_by_key(|item| item.num_splits == 1);
        let last = (records.len() - 1) * num_workers + mine[0].worker;
        if items.len() <= last {
            items.resize(last + 1, StreamItem::default());
        }
        for (depth, record) in records.into_iter().enumerate() {
            items[depth * num_workers + mine[0].worker] = record;
        }
    }
    let num_growing = if window.is_none() { rows.len() } else { 0 };
    let num_steps = growth.num_steps(num_workers, num_growing);
    StreamList { items, num_workers, num_partial_rows, num_steps }
}

fn stretch(row: &RowExtent, window: Option<usize>) -> Stretch {
    let first = (row.first_page_offset + visible_begin(row, window)) / STREAM_QUANTUM_TOKENS;
    let end = (row.first_page_offset + row.length).div_ceil(STREAM_QUANTUM_TOKENS);
    Stretch { first, count: if row.length == 0 { 0 } else { end - first } }
}

/// Deals the rows to the workers, longest first; pieces come in worker order. Every row has one, also an empty row.
fn cut(stretches: &[Stretch], num_workers: usize, max_splits: usize) -> Vec<Piece> {
    let mut order: Vec<_> = (0..stretches.len()).collect();
    order.sort_by_key(|&row| Reverse(stretches[row].count));
    let mut borders = Vec::with_capacity(order.len());
    let mut total = 0;
    for &row in &order {
        total += stretches[row].count;
        borders.push(total);
    }
    let num_used = num_workers.min(total).max(1);
    let end_of = |worker: usize| {
        if worker + 1 == num_used { usize::MAX } else { stretch_end(&borders, worker + 1, num_used) }
    };

    let mut pieces = Vec::with_capacity(order.len() + num_used);
    let (mut worker, mut stretch_end, mut position) = (0, end_of(0), 0);
    for row in order {
        let count = stretches[row].count;
        let (mut begin, mut num_pieces) = (0, 1);
        loop {
            while position >= stretch_end {
                worker += 1;
                stretch_end = end_of(worker);
            }
            let left = count - begin;
            let take = if num_pieces >= max_splits { left } else { left.min(stretch_end - position) };
            pieces.push(Piece { row, worker, begin, end: begin + take });
            (position, begin, num_pieces) = (position + take, begin + take, num_pieces + 1);
            if begin == count {
                break;
            }
        }
    }
    pieces
}

/// Where the first `num_stretches` of `num_used` stretches end, in quanta. In f64 as the reference has it: the same roundings
/// give the same cuts.
fn stretch_end(borders: &[usize], num_stretches: usize, num_used: usize) -> usize {
    let total = borders[borders.len() - 1];
    let exact = (num_stretches * total) as f64 / num_used as f64;
    let slack = 0.02 * total as f64 / num_used as f64;
    let distance = |border: usize| (border as f64 - exact).abs();
    let above = borders.partition_point(|&border| (border as f64) < exact).min(borders.len() - 1);
    let mut nearest = borders[above];
    if above > 0 && distance(borders[above - 1]) <= distance(nearest) {
        nearest = borders[above - 1];
    }
    if distance(nearest) <= slack { nearest } else { exact.round_ties_even() as usize }
}

/// Tokens of each worker, and how many of its items grow with their rows.
#[derive(Default)]
struct Growth {
    workers: Vec<(usize, usize)>,
}

impl Growth {
    fn next_worker(&mut self) {
        self.workers.push((0, 0));
    }

    fn add(&mut self, num_tokens: usize, is_open: bool) {
        if let Some((tokens, num_open)) = self.workers.last_mut() {
            *tokens += num_tokens;
            *num_open += usize::from(is_open);
        }
    }

    /// Steps until a worker passes the bound, if `num_growing` rows grow by a token a step.
    fn num_steps(&self, num_workers: usize, num_growing: usize) -> usize {
        let (above, below) = (STREAM_IMBALANCE_BOUND.0 as i128, STREAM_IMBALANCE_BOUND.1 as i128);
        let num_workers = num_workers as i128;
        let longest = self.workers.iter().map(|&(tokens, _)| tokens).max().unwrap_or(0) as i128;
        let allowed = num_workers * (above * longest + below * (STREAM_QUANTUM_TOKENS / 2) as i128);
        let steps = self.workers.iter().map(|&(tokens, num_open)| {
            // num_workers * below * (tokens + n * num_open) <= allowed + n * above * num_growing
            let per_step = num_workers * below * num_open as i128 - above * num_growing as i128;
            let room = allowed - num_workers * below * tokens as i128;
            if per_step > 0 { usize::try_from(room / per_step).unwrap_or(usize::MAX) } else { usize::MAX }
        });
        steps.min().unwrap_or(usize::MAX)
    }
}

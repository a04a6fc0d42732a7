//! Split-KV: divides the rows of a batch into chunks of about equal length.
//!
//! The target chunk is what gives `split_target` chunks over the whole batch. A row longer than it is divided into even
//! chunks; shorter rows stay whole and write their output directly. If a chunk up to a quarter longer brings the count down
//! to `split_target` (whole rounds over the workers), that one is used. This differs from planners that look for one chunk
//! size and leave a row's remainder in a chunk of its own: here the longest chunk is never twice the others.
//!
//! Bounds: at most `split_target` + rows items; no chunk longer than 5/4 of the target chunk and one slice, unless a cap on the
//! number of items forbids more.

use super::config::{Capacities, FIXED_CHUNK_TOKENS};
use super::work::{MergeRow, WorkItem};

/// Shortest chunk that is worth a partial result, in tokens.
pub const MIN_CHUNK_TOKENS: usize = 128;

/// Chunk borders are multiples of this many tokens, counted from the start of the row's first page. With page sizes that
/// divide it or are multiples of it, a slice never straddles a page.
pub const SLICE_TOKENS: usize = 16;

/// What the split needs to know of one row; `[row]` in batch order.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowExtent {
    pub(super) slot: u32,
    /// Tokens in the table from `first_page_offset` on.
    pub(super) length: usize,
    pub(super) first_page_offset: usize,
    /// Absolute position of the next token.
    pub(super) position: usize,
}

/// Items of a row in the list.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ItemRange {
    pub(super) begin: u32,
    pub(super) count: u32,
}

/// A work list and the facts that tell how long it stays good.
#[derive(Debug, Default)]
pub(super) struct SplitResult {
    pub(super) items: Vec<WorkItem>,
    pub(super) merges: Vec<MergeRow>,
    pub(super) num_partial_rows: usize,
    /// `[row]`
    pub(super) row_items: Vec<ItemRange>,
    /// Longest item, and longest last item of a row, in tokens at the time of the split.
    pub(super) longest: usize,
    pub(super) longest_last: usize,
    /// Visible tokens of all rows, each row rounded up to whole slices.
    pub(super) num_tokens: usize,
    /// Steps for which fixed chunks stay as they are (`batch_invariant` only).
    pub(super) num_valid_steps: usize,
    order: Vec<u64>,
}

/// Tokens per chunk that the batch should have: its share of `split_target`, but not less than a worthwhile chunk.
pub(super) const fn target_chunk(num_tokens: usize, split_target: usize) -> usize {
    let even = num_tokens.div_ceil(split_target);
    if even > MIN_CHUNK_TOKENS { even } else { MIN_CHUNK_TOKENS }
}

/// A row's visible tokens as slices `first..end`, from the start of its first page.
struct Slices {
    first: usize,
    end: usize,
}

impl SplitResult {
    /// Divides `rows` anew.
    pub(super) fn split(&mut self, rows: &[RowExtent], capacities: &Capacities) {
        self.items.clear();
        self.merges.clear();
        self.row_items.clear();
        self.row_items.resize(rows.len(), ItemRange::default());
        (self.num_partial_rows, self.longest, self.longest_last, self.num_tokens) = (0, 0, 0, 0);
        self.num_valid_steps = usize::MAX;
        if capacities.config.batch_invariant {
            self.split_fixed(rows, capacities);
        } else {
            self.split_even(rows, capacities);
        }
    }

    fn split_even(&mut self, rows: &[RowExtent], capacities: &Capacities) {
        let window = capacities.config.window;
        let max_splits = capacities.config.num_splits.unwrap_or(usize::MAX);
        let slices = |row: &RowExtent| {
            let begin = row.first_page_offset + visible_begin(row, window);
            let end = row.first_page_offset + row.length;
            if begin == end {
                Slices { first: 0, end: 0 }
            } else {
                Slices { first: begin / SLICE_TOKENS, end: end.div_ceil(SLICE_TOKENS) }
            }
        };
        let mut num_slices = 0;
        for row in rows {
            let Slices { first, end } = slices(row);
            num_slices += end - first;
        }
        self.num_tokens = num_slices * SLICE_TOKENS;
        // Every row takes one item; what is left of the list can go to splits.
        let split_target = capacities.split_target.min(capacities.num_work_items - rows.len());
        let chunk = chunk_slices(
            rows.iter().map(|row| slices(row).end - slices(row).first),
            num_slices,
            split_target,
        );

        let num_chunks = |row: &RowExtent| {
            let Slices { first, end } = slices(row);
            (end - first).div_ceil(chunk).clamp(1, max_splits)
        };
        self.order_rows(rows, |row| {
            let Slices { first, end } = slices(row);
            (end - first).div_ceil(num_chunks(row))
        });
        for position in 0..rows.len() {
            let index = self.order[position] as u32 as usize;
            let row = &rows[index];
            let Slices { first, end } = slices(row);
            let count = num_chunks(row);
            let border = |chunk: usize| {
                let slice = first + (end - first) * chunk / count;
                (slice * SLICE_TOKENS).saturating_sub(row.first_page_offset)
            };
            self.emit(index, row, window, count, border);
        }
    }

    /// Chunks of `FIXED_CHUNK_TOKENS`, or the multiple that `num_splits` asks for, with borders at absolute positions.
    fn split_fixed(&mut self, rows: &[RowExtent], capacities: &Capacities) {
        let window = capacities.config.window;
        let mut num_valid_steps = usize::MAX;
        self.order_rows(rows, |row| row.length - visible_begin(row, window));
        for order in 0..rows.len() {
            let index = self.order[order] as u32 as usize;
            let row = &rows[index];
            let visible = visible_begin(row, window);
            let chunk = match capacities.config.num_splits {
                None => FIXED_CHUNK_TOKENS,
                Some(1) => usize::MAX,
                // One chunk more than the quotient, as the first one starts anywhere.
                Some(splits) => {
                    let span = FIXED_CHUNK_TOKENS * (splits - 1);
                    let multiple = (row.length - visible).div_ceil(span).max(1);
                    if window.is_none_or(|window| row.length < window) {
                        num_valid_steps = num_valid_steps.min(multiple * span - (row.length - visible));
                    }
                    multiple * FIXED_CHUNK_TOKENS
                }
            };
            let start = row.position - row.length;
            let first_chunk = (start + visible) / chunk;
            let end_chunk = (start + row.length).div_ceil(chunk).max(first_chunk + 1);
            num_valid_steps =
                num_valid_steps.min((end_chunk.saturating_mul(chunk)).saturating_sub(start + row.length));
            if end_chunk - first_chunk > 1
                && let Some(window) = window
            {
                // The first chunk is in view as long as its last token is.
                let first_end = (first_chunk + 1) * chunk - start;
                num_valid_steps = num_valid_steps.min((first_end + window - 1).saturating_sub(row.length));
            }
            let border = |chunk_index: usize| ((first_chunk + chunk_index) * chunk).saturating_sub(start);
            self.emit(index, row, window, end_chunk - first_chunk, border);
        }
        self.num_valid_steps = num_valid_steps;
    }

    /// Longest chunks first; equal ones in batch order, so that equal batches give equal lists.
    fn order_rows(&mut self, rows: &[RowExtent], chunk: impl Fn(&RowExtent) -> usize) {
        self.order.clear();
        self.order.extend(rows.iter().enumerate().map(|(index, row)| {
            let key = u32::MAX - chunk(row).min(u32::MAX as usize) as u32;
            u64::from(key) << 32 | index as u64
        }));
        self.order.sort_unstable();
    }

    /// Appends the items of one row: `count` chunks that meet at `border(1..count)`.
    fn emit(
        &mut self,
        index: usize,
        row: &RowExtent,
        window: Option<usize>,
        count: usize,
        border: impl Fn(usize) -> usize,
    ) {
        self.row_items[index] = ItemRange { begin: self.items.len() as u32, count: count as u32 };
        let partial_begin = self.num_partial_rows;
        if count > 1 {
            self.merges.push(MergeRow {
                row: index as i32,
                partial_begin: partial_begin as i32,
                num_partials: count as i32,
            });
            self.num_partial_rows += count;
        }
        let mut begin = visible_begin(row, window);
        for chunk in 0..count {
            let is_last = chunk + 1 == count;
            let end = if is_last { row.length } else { border(chunk + 1) };
            let (out_row, flags) = match count {
                1 => (index, WorkItem::VALID),
                _ => (partial_begin + chunk, WorkItem::VALID | WorkItem::SPLIT),
            };
            self.items.push(WorkItem {
                slot: row.slot as i32,
                kv_begin: begin as i32,
                kv_end: if is_last { WorkItem::OPEN_END } else { end as i32 },
                out_row: out_row as i32,
                flags,
            });
            self.longest = self.longest.max(end - begin);
            if is_last {
                self.longest_last = self.longest_last.max(end - begin);
            }
            begin = end;
        }
    }
}

pub(super) fn visible_begin(row: &RowExtent, window: Option<usize>) -> usize {
    window.map_or(0, |window| row.length.saturating_sub(window))
}

/// Slices per chunk: the target, or up to a quarter more if that fits all chunks into `split_target`.
fn chunk_slices(rows: impl Iterator<Item = usize> + Clone, num_slices: usize, split_target: usize) -> usize {
    if split_target == 0 {
        return usize::MAX;
    }
    let target = num_slices.div_ceil(split_target).max(MIN_CHUNK_TOKENS / SLICE_TOKENS);
    let fits =
        |chunk: usize| rows.clone().map(|slices| slices.div_ceil(chunk)).sum::<usize>() <= split_target;
    let (mut low, mut high) = (target, target + target / 4);
    if !fits(high) {
        return target;
    }
    while low < high {
        let middle = low.midpoint(high);
        if fits(middle) { high = middle } else { low = middle + 1 }
    }
    low
}

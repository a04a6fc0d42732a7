//! The work list: which tokens of which row one work unit reads, and which partial results belong together.

/// One chunk of one row, for every KV head. Also one row of the resident `work_items` array, `[num_work_items, 5]` i32.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkItem {
    /// Row of the resident table.
    pub slot: i32,
    /// First token, counted from the row's token at `first_page_offset`.
    pub kv_begin: i32,
    /// End of the tokens: the kernel reads up to `min(kv_end, length)`. [`OPEN_END`](Self::OPEN_END) in a row's last item.
    pub kv_end: i32,
    /// Where the result goes: the batch row, or the partial row if the item is one of several of its row.
    pub out_row: i32,
    /// [`VALID`](Self::VALID), [`SPLIT`](Self::SPLIT).
    pub flags: i32,
}

impl WorkItem {
    /// The item is in use; every other field of an unused item is 0.
    pub const VALID: i32 = 1;
    /// The item is one of several of its row: `out_row` is a partial row.
    pub const SPLIT: i32 = 2;
    /// `kv_end` of a row's last item, which grows with the row.
    pub const OPEN_END: i32 = i32::MAX;
    /// Fields of an item in the resident array.
    pub const NUM_FIELDS: usize = 5;

    /// True if the item's result is a partial one, to be merged.
    pub const fn is_split(&self) -> bool {
        self.flags & Self::SPLIT != 0
    }

    /// Tokens that the item covers in a row of `length` tokens under `window`, as a range from the row's first table token;
    /// empty if the window has left the item behind.
    pub fn tokens(&self, length: usize, window: Option<usize>) -> std::ops::Range<usize> {
        let visible = window.map_or(0, |window| length.saturating_sub(window));
        let begin = visible.max(self.kv_begin as usize);
        let end = length.min(self.kv_end as usize);
        begin..end.max(begin)
    }

    pub(super) const fn fields(&self) -> [i32; Self::NUM_FIELDS] {
        [self.slot, self.kv_begin, self.kv_end, self.out_row, self.flags]
    }
}

/// The partial rows of one split row. Also one row of the resident `merge_rows` array, `[max_slots, 3]` i32.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MergeRow {
    /// Batch row that the merged result goes to.
    pub row: i32,
    /// First partial row.
    pub partial_begin: i32,
    /// Number of partial rows, 2 or more.
    pub num_partials: i32,
}

impl MergeRow {
    /// Fields of an entry in the resident array.
    pub const NUM_FIELDS: usize = 3;

    pub(super) const fn fields(&self) -> [i32; Self::NUM_FIELDS] {
        [self.row, self.partial_begin, self.num_partials]
    }
}

/// The items of a decode step, as [`DecodePlan::work`](super::DecodePlan::work) shows them.
#[derive(Debug, Clone, Copy)]
pub struct Work<'a> {
    /// Items in use, longest rows' chunks first, the items of one row side by side and in token order. Every batch row has at
    /// least one, also an empty row.
    pub items: &'a [WorkItem],
    /// Rows with several items, each with its partial rows in token order.
    pub merges: &'a [MergeRow],
    /// Partial rows in use; never more than `num_work_items`.
    pub num_partial_rows: usize,
}

//! Keeps a copy of the plan on a device in step with the plan, by single words to write.
//!
//! The device holds two i32 arrays, laid out by [`DeviceLayout`]. Once a step it applies the words of
//! [`DeviceMirror::sync`] and then adds one token to every row by itself, so a step in which nothing but lengths changes
//! needs no word at all. Rows are addressed from the start of their part of the page table: dropping head pages moves
//! nothing on the device, a window trims what is visible there.

use super::config::MAX_WORK_ITEMS;
use super::resident::own;
use super::{DecodePlan, StreamItem};
use crate::error::{Error, Result};
use crate::geometry::{MAX_INDEX, check_count};

/// Where things are on the device. `state` is i32 `[2, num_slots]`: tokens of a slot, counted from the start of its part of
/// the table, then positions of its next token. `table` is i32 `[num_table_words]`: page ids `[num_slots, row_stride]`, slots of the
/// batch rows `[max_slots]`, work items `[num_items, 8]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLayout {
    /// Slots of the plan and one more, which never holds a token: rows that pad the batch are in it.
    pub num_slots: usize,
    /// Page ids from one slot to the next.
    pub row_stride: usize,
    /// Place in `table` of the slots of the batch rows.
    pub row_slots_begin: usize,
    /// Place in `table` of the work items, a multiple of 4.
    pub work_items_begin: usize,
    /// Work items, valid or not.
    pub num_items: usize,
    /// Words of `table`.
    pub num_table_words: usize,
}

impl DeviceLayout {
    /// Words of `state`; a word's address counts them first, then those of `table`.
    pub const fn num_state_words(&self) -> usize {
        2 * self.num_slots
    }

    /// The slot of padding rows.
    pub const fn null_slot(&self) -> usize {
        self.num_slots - 1
    }
}

/// What the device has of one slot.
#[derive(Debug, Clone, Copy, Default)]
struct SlotMirror {
    version: u64,
    end: i32,
    position: i32,
    num_pages: usize,
}

/// A batch row as the work list was made for: slot, version of its pages, first token if there is no window.
type ListedRow = (u32, u64, usize);

/// The device's copy of one plan. See the [module](self).
#[derive(Debug)]
pub struct DeviceMirror {
    layout: DeviceLayout,
    num_workers: usize,
    slots: Vec<SlotMirror>,
    row_slots: Vec<i32>,
    items: Vec<StreamItem>,
    /// Items from here on have never been used, or not since the last list.
    num_used_items: usize,
    listed: Vec<ListedRow>,
    num_listed_rows: usize,
    num_lists: u64,
    pace: MirrorPace,
}

/// What a steady step looks at, side by side.
#[derive(Debug, Clone, Copy, Default)]
struct MirrorPace {
    /// Edits and steps of the plan when the device was last in step with it.
    num_edits: u64,
    num_advances: u64,
    /// Steps for which the work list is still good; 0 before there is one.
    num_steps_left: usize,
    /// Steps since `slots` was last brought up to date, in which the listed rows got a token each and nothing else happened.
    num_steady_steps: i32,
}

impl DeviceMirror {
    /// A mirror of a device whose arrays are all zero.
    ///
    /// # Errors
    /// `InvalidArgument` if `num_workers` is out of range or the arrays would exceed 2^31 - 1 words.
    pub fn new(plan: &DecodePlan, num_workers: usize) -> Result<Self> {
        check_count("num_workers", num_workers, MAX_WORK_ITEMS)?;
        let max_slots = plan.config().max_slots;
        let (num_slots, row_stride) = (max_slots + 1, plan.capacities.row_stride);
        let depth = if plan.config().batch_invariant {
            plan.num_work_items().div_ceil(num_workers) + 1
        } else {
            num_slots // a worker may get all short rows that a long one leaves over
        };
        let num_items = check_count("num_workers", depth.saturating_mul(num_workers), MAX_WORK_ITEMS)?;
        let row_slots_begin = num_slots * row_stride;
        let work_items_begin = (row_slots_begin + max_slots).next_multiple_of(4);
        let num_table_words = work_items_begin + num_items * StreamItem::NUM_FIELDS;
        let layout = DeviceLayout {
            num_slots,
            row_stride,
            row_slots_begin,
            work_items_begin,
            num_items,
            num_table_words,
        };
        if num_table_words + layout.num_state_words() > MAX_INDEX {
            return Err(Error::invalid(
                "num_workers",
                format!("the device table takes {num_table_words} words, more than {MAX_INDEX}"),
            ));
        }
        Ok(Self {
            layout,
            num_workers,
            slots: vec![SlotMirror::default(); num_slots],
            row_slots: vec![0; max_slots],
            items: vec![StreamItem::default(); num_items],
            num_used_items: 0,
            listed: Vec::with_capacity(max_slots),
            num_listed_rows: 0,
            num_lists: 0,
            pace: MirrorPace::default(),
        })
    }

    /// Where things are on the device.
    pub const fn layout(&self) -> &DeviceLayout {
        &self.layout
    }

    /// Partial rows that a launch can need.
    pub fn max_partial_rows(plan: &DecodePlan, num_workers: usize) -> usize {
        if plan.config().batch_invariant { plan.num_work_items() } else { 2 * num_workers }
    }

    /// Work lists made so far.
    pub const fn num_lists(&self) -> u64 {
        self.num_lists
    }

    /// [`sync`](Self::sync) for as many rows as last time, if nothing has happened since but one [`DecodePlan::advance`]: no
    /// word is to be written then. Constant time. False, and nothing changed, if there is more to it.
    pub fn try_sync(&mut self, plan: &DecodePlan) -> bool {
        let (mirror, plan) = (&mut self.pace, &plan.pace);
        let is_steady = mirror.num_steps_left > 0
            && mirror.num_edits == plan.num_edits
            && mirror.num_advances + 1 == plan.num_advances;
        if is_steady {
            mirror.num_advances = plan.num_advances;
            mirror.num_steps_left -= 1;
            mirror.num_steady_steps += 1;
        }
        is_steady
    }

    /// Appends to `words` the pairs (address, value) that make the device's copy such that, once every row has got one more
    /// token there, it is the plan as it is now. To be called once for every step of the device, usually after one
    /// [`DecodePlan::advance`]; empty when only lengths have grown by it. After any other number of them, none included,
    /// lengths and positions are among the words; head pages that have left a window are seen until the next one. The
    /// batch has `num_rows` rows on the device, those beyond the plan's are padding.
    ///
    /// # Errors
    /// `InvalidArgument` if `num_rows` is less than the plan's rows or more than its slots. The mirror is unchanged then.
    pub fn sync(&mut self, plan: &DecodePlan, num_rows: usize, words: &mut Vec<(i32, i32)>) -> Result<()> {
        let max_slots = plan.config().max_slots;
        if num_rows < plan.num_rows() || num_rows > max_slots {
            return Err(Error::invalid(
                "num_rows",
                format!("expected {}..={max_slots}, got {num_rows}", plan.num_rows()),
            ));
        }
        self.book_steady_steps();
        let num_steps =
            plan.rows.iter().map(|&slot| self.num_new_tokens(plan, slot as usize)).max().unwrap_or(0);
        let is_listed = self.num_listed_rows == num_rows
            && num_steps <= self.pace.num_steps_left
            && self.listed.iter().copied().eq(plan.rows.iter().map(|&slot| listed_row(plan, slot)));
        let list = if is_listed {
            None
        } else {
            Some(plan.used_stream_items(self.num_workers, self.layout.num_items)?)
        };
        for &slot in &plan.rows {
            self.sync_slot(plan, slot as usize, words);
        }
        self.sync_row_slots(plan, num_rows, words);
        match list {
            None => self.pace.num_steps_left -= num_steps,
            Some(list) => {
                self.pace.num_steps_left = list.num_steps;
                self.listed.clear();
                self.listed.extend(plan.rows.iter().map(|&slot| listed_row(plan, slot)));
                self.num_listed_rows = num_rows;
                self.num_lists += 1;
                self.sync_items(plan, list.items, num_rows, words);
            }
        }
        (self.pace.num_edits, self.pace.num_advances) = (plan.pace.num_edits, plan.pace.num_advances);
        Ok(())
    }

    /// Brings `slots` up to the last call. The listed rows are the plan's of that time.
    fn book_steady_steps(&mut self) {
        let num_steps = std::mem::take(&mut self.pace.num_steady_steps);
        for &(slot, ..) in &self.listed {
            let mirror = &mut self.slots[slot as usize];
            mirror.end += num_steps;
            mirror.position += num_steps;
        }
    }

    /// Tokens that a slot has got since the last step of the device, if nothing else has happened to it.
    fn num_new_tokens(&self, plan: &DecodePlan, slot: usize) -> usize {
        slot_end(plan, slot).saturating_sub(self.slots[slot].end as usize)
    }

    fn sync_slot(&mut self, plan: &DecodePlan, slot: usize, words: &mut Vec<(i32, i32)>) {
        let DeviceLayout { num_slots, row_stride, .. } = self.layout;
        let version = plan.row_versions[slot];
        let end = slot_end(plan, slot) as i32;
        let position = own(&plan.resident.positions[slot]);
        let pages = plan.held_pages(slot);
        let first = own(&plan.resident.row_start[slot]) as usize - slot * row_stride;
        let num_pages = first + pages.len();

        let mirror = &mut self.slots[slot];
        let first_new =
            if mirror.version == version { mirror.num_pages.clamp(first, num_pages) } else { first };
        for place in first_new..num_pages {
            let address = 2 * num_slots + slot * row_stride + place;
            words.push((address as i32, own(&pages[place - first])));
        }
        if mirror.end != end - 1 {
            words.push((slot as i32, end - 1));
        }
        if mirror.position != position - 1 {
            words.push(((num_slots + slot) as i32, position - 1));
        }
        *mirror = SlotMirror { version, end, position, num_pages };
    }

    fn sync_row_slots(&mut self, plan: &DecodePlan, num_rows: usize, words: &mut Vec<(i32, i32)>) {
        let begin = self.layout.num_state_words() + self.layout.row_slots_begin;
        for row in 0..num_rows {
            let slot = plan.rows.get(row).map_or(self.layout.null_slot() as i32, |&slot| slot as i32);
            if self.row_slots[row] != slot {
                self.row_slots[row] = slot;
                words.push(((begin + row) as i32, slot));
            }
        }
    }

    fn sync_items(
        &mut self,
        plan: &DecodePlan,
        mut items: Vec<StreamItem>,
        num_rows: usize,
        words: &mut Vec<(i32, i32)>,
    ) {
        let num_padding = num_rows - plan.num_rows();
        // Room for the padding in any column: as many full turns over the workers as its rows can take.
        let num_turns = items.len().div_ceil(self.num_workers) + num_padding.div_ceil(self.num_workers);
        let num_used = (num_turns * self.num_workers).min(self.items.len());
        items.resize(num_used.max(self.num_used_items), StreamItem::default());
        self.num_used_items = num_used;
        for item in items.iter_mut().filter(|item| item.flags & StreamItem::VALID != 0) {
            let begin = row_begin(plan, item.slot as usize) as i32;
            item.kv_begin += begin;
            item.kv_end += begin;
        }
        self.add_padding(&mut items, plan.num_rows()..num_rows);
        let begin = self.layout.num_state_words() + self.layout.work_items_begin;
        for (index, (old, new)) in self.items.iter_mut().zip(&items).enumerate() {
            if new.flags & StreamItem::VALID == 0 {
                // A worker stops at the flag, so the other fields may keep what they hold.
                if old.flags & StreamItem::VALID != 0 {
                    old.flags = 0;
                    words.push(((begin + index * StreamItem::NUM_FIELDS + 3) as i32, 0));
                }
                continue;
            }
            for (field, (is, wanted)) in old.fields().into_iter().zip(new.fields()).enumerate() {
                if is != wanted {
                    words.push(((begin + index * StreamItem::NUM_FIELDS + field) as i32, wanted));
                }
            }
            *old = *new;
        }
    }

    /// Gives every padding row an empty item, which writes zeros: an output that nobody wrote could hold anything. The last
    /// workers come first, which have a row's remainder at most.
    fn add_padding(&self, items: &mut [StreamItem], rows: std::ops::Range<usize>) {
        for (index, row) in rows.enumerate() {
            let worker = self.num_workers - 1 - index % self.num_workers;
            let column = items.iter_mut().skip(worker).step_by(self.num_workers);
            if let Some(free) = column.into_iter().find(|item| item.flags & StreamItem::VALID == 0) {
                *free = StreamItem {
                    slot: self.layout.null_slot() as i32,
                    flags: StreamItem::VALID | StreamItem::OPEN_END,
                    out_row: row as i32,
                    num_splits: 1,
                    ..StreamItem::default()
                };
            }
        }
    }
}

/// First held token of a slot, counted from the start of its part of the table.
fn row_begin(plan: &DecodePlan, slot: usize) -> usize {
    let dropped_pages = own(&plan.resident.row_start[slot]) as usize - slot * plan.capacities.row_stride;
    dropped_pages * plan.config().page_size + own(&plan.resident.first_page_offsets[slot]) as usize
}

/// One past the last token of a slot, counted from the start of its part of the table.
fn slot_end(plan: &DecodePlan, slot: usize) -> usize {
    row_begin(plan, slot) + own(&plan.resident.lengths[slot]) as usize
}

fn listed_row(plan: &DecodePlan, slot: u32) -> ListedRow {
    let begin = if plan.config().window.is_some() { 0 } else { row_begin(plan, slot as usize) };
    (slot, plan.row_versions[slot as usize], begin)
}

//! The device's copy of a plan, read as the kernels read it.

use std::collections::HashMap;

use paged_core::plan::{DecodePlan, DeviceMirror, PlanConfig, StreamItem};
use paged_core::{Error, HeadGeometry, Slot};
use proptest::prelude::*;

const PAGE_SIZE: usize = 8;
const MAX_SLOTS: usize = 6;
const MAX_PAGES: usize = 40;
const NUM_PAGES: usize = 1000;

/// The two arrays of a device and what its step kernel does with them.
struct Device {
    state: Vec<i32>,
    table: Vec<i32>,
    mirror: DeviceMirror,
    /// The same device, whose mirror compares every row in every step.
    twin: DeviceMirror,
    last_rows: usize,
    num_steady: usize,
}

impl Device {
    fn new(plan: &DecodePlan, num_workers: usize) -> Self {
        let mirror = DeviceMirror::new(plan, num_workers).unwrap();
        let twin = DeviceMirror::new(plan, num_workers).unwrap();
        let layout = *mirror.layout();
        let (state, table) = (vec![0; layout.num_state_words()], vec![0; layout.num_table_words]);
        Self { state, table, mirror, twin, last_rows: 0, num_steady: 0 }
    }

    /// Applies the words, adds a token to every row, and returns the number of words and the rows' positions.
    fn step(&mut self, plan: &DecodePlan, num_rows: usize) -> (usize, Vec<i32>) {
        let mut words = Vec::new();
        if num_rows == self.last_rows && self.mirror.try_sync(plan) {
            self.num_steady += 1;
        } else {
            self.mirror.sync(plan, num_rows, &mut words).unwrap();
        }
        self.last_rows = num_rows;
        let mut wanted = Vec::new();
        self.twin.sync(plan, num_rows, &mut wanted).unwrap();
        assert_eq!(words, wanted);
        assert_eq!(self.mirror.num_lists(), self.twin.num_lists());
        let layout = *self.mirror.layout();
        for &(address, value) in &words {
            let address = address as usize;
            match address.checked_sub(layout.num_state_words()) {
                None => self.state[address] = value,
                Some(place) => self.table[place] = value,
            }
        }
        let mut positions = Vec::new();
        for row in 0..num_rows {
            let slot = self.table[layout.row_slots_begin + row] as usize;
            positions.push(self.state[layout.num_slots + slot]);
            if slot != layout.null_slot() {
                self.state[slot] += 1;
                self.state[layout.num_slots + slot] += 1;
            }
        }
        (words.len(), positions)
    }

    fn items(&self, num_workers: usize) -> Vec<StreamItem> {
        let layout = *self.mirror.layout();
        let words = &self.table[layout.work_items_begin..][..layout.num_items * StreamItem::NUM_FIELDS];
        let items: Vec<_> = words
            .chunks_exact(StreamItem::NUM_FIELDS)
            .map(|word| StreamItem {
                slot: word[0],
                kv_begin: word[1],
                kv_end: word[2],
                flags: word[3],
                out_row: word[4],
                split: word[5],
                num_splits: word[6],
                partial_row: word[7],
            })
            .collect();
        let column = |worker| items.iter().skip(worker).step_by(num_workers);
        (0..num_workers)
            .flat_map(|worker| column(worker).take_while(|item| item.flags & StreamItem::VALID != 0).copied())
            .collect()
    }

    /// Page and place in it of every token that the items of a row read, in order.
    fn tokens(&self, items: &[StreamItem], window: Option<usize>) -> Vec<(i32, usize)> {
        let layout = *self.mirror.layout();
        let mut read = Vec::new();
        for item in items {
            let end = self.state[item.slot as usize] as usize;
            let visible = window.map_or(0, |window| end.saturating_sub(window));
            let last =
                if item.flags & StreamItem::OPEN_END != 0 { end } else { end.min(item.kv_end as usize) };
            for token in visible.max(item.kv_begin as usize)..last {
                let place = token / PAGE_SIZE;
                assert!(place < layout.row_stride);
                read.push((self.table[item.slot as usize * layout.row_stride + place], token % PAGE_SIZE));
            }
        }
        read
    }
}

/// What the plan says that its row reads.
fn wanted_tokens(plan: &DecodePlan, row: usize) -> Vec<(i32, usize)> {
    let view = plan.row(row).unwrap();
    let visible = plan.config().window.map_or(0, |window| view.length.saturating_sub(window));
    (visible..view.length)
        .map(|token| token + view.first_page_offset)
        .map(|at| (view.pages[at / PAGE_SIZE], at % PAGE_SIZE))
        .collect()
}

fn check(plan: &DecodePlan, device: &Device, num_workers: usize, num_rows: usize, positions: &[i32]) {
    let mut rows: HashMap<i32, Vec<StreamItem>> = HashMap::new();
    for item in device.items(num_workers) {
        rows.entry(item.out_row).or_default().push(item);
    }
    assert_eq!(rows.len(), num_rows, "every row, padding too, has an item");
    let mut partial_rows = Vec::new();
    for (row, mut items) in rows {
        items.sort_by_key(|item| item.split);
        assert!(items.iter().all(|item| item.num_splits as usize == items.len()));
        if items.len() > 1 {
            partial_rows.extend(items.iter().map(|item| item.partial_row));
        }
        let window = plan.config().window;
        if row as usize >= plan.num_rows() {
            assert_eq!(device.tokens(&items, window), []);
            assert_eq!(positions[row as usize], 0);
            continue;
        }
        assert_eq!(device.tokens(&items, window), wanted_tokens(plan, row as usize));
        assert_eq!(positions[row as usize], plan.row(row as usize).unwrap().position as i32 - 1);
    }
    partial_rows.sort_unstable();
    assert!(partial_rows.windows(2).all(|pair| pair[0] < pair[1]), "a partial row is used twice");
    let bound = DeviceMirror::max_partial_rows(plan, num_workers) as i32;
    assert!(partial_rows.iter().all(|&row| row < bound));
}

#[derive(Debug, Clone)]
enum Edit {
    Admit {
        num_tokens: usize,
        offset: usize,
    },
    Retire(usize),
    Replace(usize),
    RetireHead(usize),
    /// Steps of the device, and how often the plan advances before each.
    Steps(usize, usize),
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let edit = prop_oneof![
        (0..200_usize, 0..PAGE_SIZE).prop_map(|(num_tokens, offset)| Edit::Admit { num_tokens, offset }),
        (0..MAX_SLOTS).prop_map(Edit::Retire),
        (0..MAX_SLOTS).prop_map(Edit::Replace),
        (0..MAX_SLOTS).prop_map(Edit::RetireHead),
        (1..60_usize).prop_map(|count| Edit::Steps(count, 1)),
        (1..10_usize, 0..4_usize).prop_map(|(count, advances)| Edit::Steps(count, advances)),
    ];
    prop::collection::vec(edit, 1..40)
}

fn new_plan(window: Option<usize>, batch_invariant: bool) -> DecodePlan {
    let heads = HeadGeometry { num_qo_heads: 8, num_kv_heads: 2, head_dim: 64 };
    let config = PlanConfig {
        window,
        batch_invariant,
        num_workers: Some(8),
        ..PlanConfig::new(MAX_SLOTS, MAX_PAGES, NUM_PAGES, PAGE_SIZE, heads)
    };
    DecodePlan::new(config).unwrap()
}

/// Gives every row room for a token; rows that are full leave.
fn make_room(plan: &mut DecodePlan, next_page: &mut u32) {
    for slot in plan.rows_needing_page() {
        drop_head(plan, slot);
        if plan.append_page(slot, *next_page % NUM_PAGES as u32).is_err() {
            plan.retire(slot).unwrap();
        }
        *next_page += 1;
    }
}

/// Drops the head pages that the row's window has left.
fn drop_head(plan: &mut DecodePlan, slot: Slot) {
    let row = plan.row(plan.row_of(slot).unwrap()).unwrap();
    let Some(window) = plan.config().window else { return };
    let kept = row.length.min(window - 1);
    let unseen = row.first_page_offset + row.length - kept;
    let num_pages = unseen / PAGE_SIZE;
    if num_pages > 0 && kept > 0 {
        plan.retire_head_pages(slot, num_pages, unseen % PAGE_SIZE).unwrap();
    }
}

proptest! {
    #[test]
    fn the_device_reads_what_the_plan_says(
        edits in edits(), window in prop::option::of(1..120_usize), batch_invariant: bool, num_workers in 1..9_usize,
        num_padding in 0..3_usize,
    ) {
        let mut plan = new_plan(window, batch_invariant);
        let mut device = Device::new(&plan, num_workers);
        let mut next_page = 0;
        for edit in edits {
            let slot_of = |plan: &DecodePlan, row: usize| plan.slot_of(row % plan.num_rows().max(1)).ok();
            match edit {
                Edit::Admit { num_tokens, offset } => {
                    let offset = if num_tokens == 0 { 0 } else { offset };
                    let count = (num_tokens + offset).div_ceil(PAGE_SIZE) as u32;
                    let pages: Vec<_> = (0..count).map(|page| (next_page + page) % NUM_PAGES as u32).collect();
                    next_page += count;
                    let _ = plan.admit(&pages, num_tokens, offset, Some(num_tokens + 5));
                }
                Edit::Retire(row) => {
                    if let Some(slot) = slot_of(&plan, row) {
                        plan.retire(slot).unwrap();
                    }
                }
                Edit::Replace(row) => {
                    if let Some(slot) = slot_of(&plan, row) {
                        let _ = plan.replace_page(slot, 0, next_page % NUM_PAGES as u32);
                        next_page += 1;
                    }
                }
                Edit::RetireHead(row) => {
                    if let Some(slot) = slot_of(&plan, row) {
                        drop_head(&mut plan, slot);
                    }
                }
                Edit::Steps(count, advances) => {
                    // Head pages leave a window for the sake of the token that comes next.
                    let advances = advances.max(usize::from(window.is_some()));
                    for _ in 0..count {
                        for _ in 0..advances {
                            make_room(&mut plan, &mut next_page);
                            plan.advance().unwrap();
                        }
                        let num_rows = (plan.num_rows() + num_padding).min(MAX_SLOTS);
                        let (_, positions) = device.step(&plan, num_rows);
                        check(&plan, &device, num_workers, num_rows, &positions);
                    }
                }
            }
        }
    }
}

#[test]
fn a_steady_step_writes_no_word_and_a_page_crossing_one() {
    let mut plan = new_plan(None, false);
    let mut device = Device::new(&plan, 4);
    let slots = [plan.admit(&[1, 2, 3], 20, 0, None).unwrap(), plan.admit(&[4, 5, 6], 17, 0, None).unwrap()];
    let mut num_words = Vec::new();
    for _ in 0..6 {
        for slot in plan.rows_needing_page() {
            plan.append_page(slot, 7).unwrap();
        }
        plan.advance().unwrap();
        num_words.push(device.step(&plan, 2).0);
    }
    assert!(num_words[0] > 0);
    assert_eq!(num_words[1..], [0, 0, 0, 1, 0], "row 0 crosses at 24 tokens");
    assert_eq!(device.mirror.num_lists(), 1);
    plan.retire(slots[0]).unwrap();
    plan.advance().unwrap();
    assert!(device.step(&plan, 2).0 > 0);
    assert_eq!(device.mirror.num_lists(), 2);
}

#[test]
fn fixed_chunks_do_not_depend_on_how_often_the_device_steps() {
    const NUM_PAGES_OF_ROW: i32 = 80;
    let heads = HeadGeometry { num_qo_heads: 8, num_kv_heads: 2, head_dim: 64 };
    let config = PlanConfig {
        batch_invariant: true,
        num_workers: Some(8),
        ..PlanConfig::new(1, NUM_PAGES_OF_ROW as usize, NUM_PAGES, PAGE_SIZE, heads)
    };
    let mut plan = DecodePlan::new(config).unwrap();
    let pages: Vec<u32> = (0..NUM_PAGES_OF_ROW as u32).collect();
    plan.admit(&pages, NUM_PAGES_OF_ROW as usize * PAGE_SIZE - 200, 0, None).unwrap();
    let mut device = Device::new(&plan, 4);
    device.step(&plan, 1);
    for _ in 0..40 {
        for _ in 0..3 {
            plan.advance().unwrap();
        }
        let (_, positions) = device.step(&plan, 1);
        check(&plan, &device, 4, 1, &positions);
        let mut fresh = Device::new(&plan, 4);
        fresh.step(&plan, 1);
        assert_eq!(device.items(4).len(), fresh.items(4).len());
    }
}

#[test]
fn head_pages_that_leave_a_window_cost_the_device_nothing() {
    let mut plan = new_plan(Some(16), false);
    let mut device = Device::new(&plan, 1);
    let slot = plan.admit(&[0, 1, 2], 23, 0, None).unwrap();
    plan.advance().unwrap();
    device.step(&plan, 1);
    plan.retire_head_pages(slot, 1, 1).unwrap();
    plan.append_page(slot, 3).unwrap();
    plan.advance().unwrap();
    assert_eq!(device.step(&plan, 1).0, 1, "the new page alone");
    assert_eq!(device.mirror.num_lists(), 1);
}

#[test]
fn a_slot_that_changes_hands_is_written_anew() {
    let mut plan = new_plan(None, false);
    let mut device = Device::new(&plan, 2);
    let old = plan.admit(&[1, 2], 10, 0, None).unwrap();
    plan.advance().unwrap();
    device.step(&plan, 1);
    plan.retire(old).unwrap();
    let new = plan.admit(&[3, 4], 10, 0, None).unwrap();
    assert_eq!(new.index, old.index);
    plan.advance().unwrap();
    let (_, positions) = device.step(&plan, 1);
    check(&plan, &device, 2, 1, &positions);
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let mut plan = new_plan(None, false);
    plan.admit(&[1], 3, 0, None).unwrap();
    plan.admit(&[2], 3, 0, None).unwrap();
    let mut mirror = DeviceMirror::new(&plan, 2).unwrap();
    for num_rows in [1, MAX_SLOTS + 1] {
        let error = mirror.sync(&plan, num_rows, &mut Vec::new()).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { argument: "num_rows", .. }), "{error:?}");
    }
    let error = DeviceMirror::new(&plan, 0).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { argument: "num_workers", .. }), "{error:?}");
}

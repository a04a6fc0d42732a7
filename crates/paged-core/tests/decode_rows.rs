//! `DecodeRows` against tables and plans that are grown one by one.

use std::sync::{Arc, Mutex, MutexGuard};

use paged_core::plan::{DecodePlan, PlanConfig};
use paged_core::{
    Append, DecodeRows, Error, HeadGeometry, PagePool, PageTable, RowGrowth, Slot, pages_needed_by,
};
use proptest::prelude::*;
use proptest::sample::Index;

const MAX_SLOTS: usize = 4;
const NUM_PAGES: usize = 24;
const PAGE_SIZES: [usize; 2] = [4, 5];
const WINDOWS: [Option<usize>; 2] = [None, Some(6)];
const NUM_GROUPS: usize = 2;

/// A batch of two KV groups, grown by `DecodeRows` or by hand.
struct Batch {
    pools: Vec<Arc<PagePool>>,
    plans: Vec<DecodePlan>,
    rows: Option<DecodeRows>,
    /// `[row][group]`
    tables: Vec<Vec<Mutex<PageTable>>>,
    slots: Vec<Vec<Slot>>,
    forks: Vec<PageTable>,
    /// Pages that somebody else holds, by group.
    held: Vec<(usize, Vec<u32>)>,
}

impl Batch {
    fn new(by_rows: bool) -> Self {
        let pools: Vec<_> = (0..NUM_GROUPS).map(|_| Arc::new(PagePool::new(NUM_PAGES).unwrap())).collect();
        let heads = HeadGeometry { num_qo_heads: 2, num_kv_heads: 2, head_dim: 64 };
        let plan = |group: usize| {
            let mut config = PlanConfig::new(MAX_SLOTS, NUM_PAGES, NUM_PAGES, PAGE_SIZES[group], heads);
            config.window = WINDOWS[group];
            DecodePlan::new(config).unwrap()
        };
        let plans: Vec<_> = (0..NUM_GROUPS).map(plan).collect();
        let groups = plans.iter().zip(&pools).map(|(plan, pool)| (plan, Arc::clone(pool)));
        let rows = by_rows.then(|| DecodeRows::new(groups).unwrap());
        Self { pools, plans, rows, tables: vec![], slots: vec![], forks: vec![], held: vec![] }
    }

    fn table(&self, row: usize, group: usize) -> MutexGuard<'_, PageTable> {
        self.tables[row][group].lock().unwrap()
    }

    fn admit(&mut self, num_tokens: usize) {
        let mut tables = Vec::new();
        for (group, pool) in self.pools.iter().enumerate() {
            let mut table = PageTable::new(Arc::clone(pool), PAGE_SIZES[group], WINDOWS[group]).unwrap();
            if self.tables.len() == MAX_SLOTS || table.append(num_tokens).is_err() {
                return;
            }
            tables.push(table);
        }
        self.start(tables);
    }

    fn start(&mut self, mut tables: Vec<PageTable>) {
        let mut slots = Vec::new();
        for (group, (plan, table)) in self.plans.iter_mut().zip(&mut tables).enumerate() {
            let slot = match &mut self.rows {
                Some(rows) => rows.admit(group, plan, table),
                None => plan.admit(table.pages(), table.num_held_tokens(), 0, Some(table.num_tokens())),
            };
            slots.push(slot.unwrap());
        }
        self.tables.push(tables.into_iter().map(Mutex::new).collect());
        self.slots.push(slots);
    }

    fn retire(&mut self, row: usize) -> Vec<PageTable> {
        let tables = self.tables.remove(row).into_iter().map(|table| table.into_inner().unwrap());
        let mut tables: Vec<PageTable> = tables.collect();
        for (group, slot) in self.slots.remove(row).into_iter().enumerate() {
            let plan = &mut self.plans[group];
            match &mut self.rows {
                Some(rows) => rows.retire(group, plan, slot, &mut tables[group]).unwrap(),
                None => plan.retire(slot).unwrap(),
            }
        }
        tables
    }

    /// One step: what the tables took, by group and row.
    fn step(&mut self) -> Result<Vec<RowGrowth>, Error> {
        let grown = if self.rows.is_some() { self.grow() } else { self.grow_by_hand() }?;
        for RowGrowth { group, row, append } in &grown {
            let last = self.table(*row, *group).pages().len() - 1;
            let (plan, slot) = (&mut self.plans[*group], self.slots[*row][*group]);
            for &(_, target) in &append.copies {
                plan.replace_page(slot, last, target)?;
            }
            for &page in &append.new_pages {
                plan.append_page(slot, page)?;
            }
        }
        if self.rows.is_none() || !grown.is_empty() {
            self.plans.iter_mut().try_for_each(DecodePlan::advance)?;
        }
        Ok(grown)
    }

    fn grow(&mut self) -> Result<Vec<RowGrowth>, Error> {
        let (tables, rows) = (&self.tables, self.rows.as_mut().unwrap());
        let mut plans: Vec<&mut DecodePlan> = self.plans.iter_mut().collect();
        rows.advance(&mut plans, |places| {
            Ok(places.iter().map(|&(group, row)| tables[row][group].lock().unwrap()).collect())
        })
    }

    fn grow_by_hand(&mut self) -> Result<Vec<RowGrowth>, Error> {
        let column = |group: usize| -> Vec<MutexGuard<'_, PageTable>> {
            self.tables.iter().map(|tables| tables[group].lock().unwrap()).collect()
        };
        for (group, pool) in self.pools.iter().enumerate() {
            let (needed, free) = (pages_needed_by(&column(group), 1)?, pool.num_free());
            if needed > free {
                return Err(Error::OutOfPages { needed, free });
            }
        }
        let mut grown = Vec::new();
        for group in 0..NUM_GROUPS {
            for (row, mut table) in column(group).into_iter().enumerate() {
                let append = table.append(1)?;
                if append != Append::default() {
                    grown.push(RowGrowth { group, row, append });
                }
            }
        }
        Ok(grown)
    }

    fn apply(&mut self, edit: &Edit) {
        match edit {
            Edit::Admit(num_tokens) => self.admit(*num_tokens),
            Edit::Hold(group, num_pages) => {
                if let Ok(pages) = self.pools[*group].acquire(*num_pages) {
                    self.held.push((*group, pages));
                }
            }
            Edit::LetGo => {
                self.forks.clear();
                for (group, pages) in self.held.drain(..) {
                    self.pools[group].release(&pages).unwrap();
                }
            }
            Edit::Step(_) => unreachable!("steps are compared"),
            Edit::OfRow(_, _) if self.tables.is_empty() => {}
            Edit::OfRow(index, edit) => self.apply_to_row(index.index(self.tables.len()), edit),
        }
    }

    fn apply_to_row(&mut self, row: usize, edit: &RowEdit) {
        match edit {
            RowEdit::Retire => drop(self.retire(row)),
            RowEdit::Fork(group) => {
                let fork = self.table(row, *group).fork().unwrap();
                self.forks.push(fork);
            }
            RowEdit::Branch if self.tables.len() == MAX_SLOTS => {}
            RowEdit::Branch => {
                let forks = (0..NUM_GROUPS).map(|group| self.table(row, group).fork().unwrap()).collect();
                self.start(forks);
            }
            RowEdit::Share(group) => {
                let last = self.table(row, *group).pages().last().copied();
                let pages: Vec<u32> = last.into_iter().collect();
                self.pools[*group].retain(&pages).unwrap();
                self.held.push((*group, pages));
            }
            RowEdit::Append(num_tokens) => {
                for group in 0..NUM_GROUPS {
                    let _ = self.table(row, group).append(*num_tokens);
                }
                let tables = self.retire(row);
                self.start(tables);
            }
            RowEdit::RetireHead => {
                for group in 0..NUM_GROUPS {
                    let mut table = self.table(row, group);
                    let num_pages = table.retire_head().unwrap().len();
                    let (slot, offset) = (self.slots[row][group], table.first_page_offset());
                    drop(table);
                    if num_pages > 0 {
                        self.plans[group].retire_head_pages(slot, num_pages, offset).unwrap();
                    }
                }
            }
            RowEdit::Release => {
                self.table(row, 0).release().unwrap();
                assert_eq!(self.table(row, 0).num_tokens(), 0);
                drop(self.retire(row));
            }
        }
    }

    /// What anybody may ask of the batch, page ids apart.
    fn state(&self) -> Vec<Vec<usize>> {
        let mut state: Vec<_> = self.pools.iter().map(|pool| vec![pool.num_free()]).collect();
        for (row, tables) in self.tables.iter().enumerate() {
            for (group, table) in tables.iter().enumerate() {
                let table = table.lock().unwrap();
                table.check_integrity().unwrap();
                let view = self.plans[group].row(row).unwrap();
                let pages: Vec<i32> = table.pages().iter().map(|&page| page as i32).collect();
                assert_eq!(view.pages, pages);
                assert_eq!(view.position, table.num_tokens());
                state.push(vec![
                    table.num_tokens(),
                    table.kv_len(),
                    table.num_held_tokens(),
                    table.first_page_offset(),
                    table.last_page_len(),
                    table.pages().len(),
                    table.head_page(),
                    table.pages_needed(1).unwrap(),
                    table.pages_needed(7).unwrap(),
                    view.length,
                    view.first_page_offset,
                ]);
            }
        }
        self.plans.iter().for_each(|plan| plan.validate().unwrap());
        self.pools.iter().for_each(|pool| pool.check_integrity().unwrap());
        state
    }
}

#[derive(Debug, Clone)]
enum Edit {
    Admit(usize),
    Step(usize),
    OfRow(Index, RowEdit),
    Hold(usize, usize),
    LetGo,
}

#[derive(Debug, Clone)]
enum RowEdit {
    Retire,
    Fork(usize),
    /// A fork that becomes a row too.
    Branch,
    Share(usize),
    /// By another way than a step: the row is then admitted anew.
    Append(usize),
    RetireHead,
    Release,
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let group = 0..NUM_GROUPS;
    let row_edit = prop_oneof![
        Just(RowEdit::Retire),
        group.clone().prop_map(RowEdit::Fork),
        Just(RowEdit::Branch),
        group.clone().prop_map(RowEdit::Share),
        (0..7_usize).prop_map(RowEdit::Append),
        Just(RowEdit::RetireHead),
        Just(RowEdit::Release),
    ];
    let edit = prop_oneof![
        2 => (0..12_usize).prop_map(Edit::Admit),
        5 => (1..9_usize).prop_map(Edit::Step),
        4 => (any::<Index>(), row_edit).prop_map(|(index, edit)| Edit::OfRow(index, edit)),
        1 => (group, 1..12_usize).prop_map(|(group, num_pages)| Edit::Hold(group, num_pages)),
        1 => Just(Edit::LetGo),
    ];
    prop::collection::vec(edit, 1..50)
}

/// Group, row, pages and copies.
fn shape(grown: &[RowGrowth]) -> Vec<(usize, usize, usize, usize)> {
    grown.iter().map(|g| (g.group, g.row, g.append.new_pages.len(), g.append.copies.len())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn rows_grow_as_tables_and_plans_do_by_hand(edits in edits()) {
        let (mut found, mut wanted) = (Batch::new(true), Batch::new(false));
        for edit in &edits {
            let Edit::Step(num_steps) = *edit else {
                found.apply(edit);
                wanted.apply(edit);
                assert_eq!(found.state(), wanted.state());
                continue;
            };
            for _ in 0..num_steps {
                let (left, right) = (found.step(), wanted.step());
                assert_eq!(left.map(|grown| shape(&grown)), right.map(|grown| shape(&grown)));
                assert_eq!(found.state(), wanted.state());
            }
        }
        found.apply(&Edit::LetGo);
        (0..found.tables.len()).for_each(|_| found.apply_to_row(0, &RowEdit::Retire));
        assert!(found.pools.iter().all(|pool| pool.num_used() == 0));
    }
}

fn try_advance(batch: &mut Batch) -> Result<bool, Error> {
    let mut plans: Vec<&mut DecodePlan> = batch.plans.iter_mut().collect();
    batch.rows.as_mut().unwrap().try_advance(&mut plans)
}

#[test]
fn a_steady_step_is_one_that_takes_no_page() {
    let mut batch = Batch::new(true);
    batch.admit(6); // room for 2 tokens in the last page of 4, for 4 in that of 5
    let before = batch.state();
    assert_eq!([(); 2].map(|()| try_advance(&mut batch).unwrap()), [true; 2]);
    assert_eq!((batch.table(0, 0).num_tokens(), batch.table(0, 1).num_tokens()), (8, 8));
    let full = batch.state();
    assert_eq!(before[..NUM_GROUPS], full[..NUM_GROUPS], "no page was taken");
    assert!(!try_advance(&mut batch).unwrap());
    assert_eq!(batch.state(), full, "a refused step changes nothing");
    assert_eq!(shape(&batch.step().unwrap()), [(0, 0, 1, 0)]);
    assert!(try_advance(&mut batch).unwrap());
    assert!(!try_advance(&mut batch).unwrap(), "the other group is full now");
    assert_eq!(shape(&batch.step().unwrap()), [(1, 0, 1, 0)]);
}

/// As they would in turn: the last holder of a page writes it in place.
#[test]
fn rows_that_share_their_last_pages_copy_all_but_once() {
    let (num_rows, group) = (3, 0);
    let mut batch = Batch::new(true);
    batch.admit(5);
    (1..num_rows).for_each(|_| batch.apply_to_row(0, &RowEdit::Branch));
    let shared = batch.table(0, group).pages().to_vec();
    let used = batch.pools[group].num_used();
    let tables: Vec<_> = (0..num_rows).map(|row| batch.table(row, group)).collect();
    assert_eq!(pages_needed_by(&tables, 1).unwrap(), num_rows - 1);
    drop(tables);
    let grown: Vec<_> = batch.step().unwrap().into_iter().filter(|grown| grown.group == group).collect();
    assert_eq!(shape(&grown), [(group, 0, 0, 1), (group, 1, 0, 1)]);
    for RowGrowth { row, append, .. } in &grown {
        assert_eq!(append.copies, [(shared[1], batch.table(*row, group).pages()[1])]);
    }
    assert_eq!(batch.table(num_rows - 1, group).pages(), shared);
    assert_eq!(batch.pools[group].num_used() - used, num_rows - 1);
    batch.state();
}

#[test]
fn a_page_that_gets_another_holder_is_copied_in_the_next_step() {
    let mut batch = Batch::new(true);
    batch.admit(1);
    assert!(try_advance(&mut batch).unwrap());
    let last = batch.table(0, 1).pages().to_vec();
    batch.pools[1].retain(&last).unwrap();
    assert!(!try_advance(&mut batch).unwrap());
    let grown = batch.step().unwrap();
    assert_eq!(grown[0].append.copies, [(last[0], batch.table(0, 1).pages()[0])]);
    let elsewhere = batch.pools[1].acquire(1).unwrap();
    batch.pools[1].retain(&elsewhere).unwrap();
    assert!(try_advance(&mut batch).unwrap());
}

#[test]
fn edits_by_another_way_are_told_and_change_nothing() {
    let mut batch = Batch::new(true);
    batch.admit(1);
    let state = batch.state();
    batch.plans[1].advance().unwrap();
    assert!(matches!(try_advance(&mut batch), Err(Error::InvalidPlan { .. })));
    assert!(matches!(batch.grow(), Err(Error::InvalidPlan { .. })));
    assert_eq!(batch.table(0, 0).num_tokens(), state[2][0]);
    let mut strange = PageTable::new(Arc::clone(&batch.pools[1]), PAGE_SIZES[0], None).unwrap();
    let refused = batch.rows.as_mut().unwrap().admit(0, &mut batch.plans[0], &mut strange);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "table", .. })));
    let refused = batch.rows.as_mut().unwrap().admit(2, &mut batch.plans[0], &mut strange);
    assert!(matches!(refused, Err(Error::InvalidArgument { argument: "group", .. })));
    let again = DecodeRows::new([(&batch.plans[0], Arc::clone(&batch.pools[0]))]);
    assert!(matches!(again, Err(Error::InvalidArgument { argument: "plans", .. })));
}

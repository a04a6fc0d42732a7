//! Whatever a caller passes, the answer is a value or an error, and a refused call leaves the object usable.

use std::sync::Arc;

use paged_core::plan::{CsrView, DecodePlan, PlanConfig, import_config};
use paged_core::{BlockBudget, HeadGeometry, PageGeometry, PagePool, PageTable, Slot};
use proptest::prelude::*;

/// Small numbers, borders of integer types, and anything.
fn size() -> impl Strategy<Value = usize> {
    let borders =
        [0, 1, 2, i32::MAX as usize, i32::MAX as usize + 1, u32::MAX as usize, usize::MAX - 1, usize::MAX];
    prop_oneof![4 => 0usize..40, 1 => prop::sample::select(borders.to_vec()), 1 => any::<usize>()]
}

fn page() -> impl Strategy<Value = u32> {
    prop_oneof![6 => 0u32..20, 1 => Just(u32::MAX), 1 => any::<u32>()]
}

fn index() -> impl Strategy<Value = i32> {
    prop_oneof![8 => -1i32..12, 1 => Just(i32::MIN), 1 => Just(i32::MAX), 1 => any::<i32>()]
}

fn heads() -> impl Strategy<Value = HeadGeometry> {
    (size(), size(), size()).prop_map(|(num_qo_heads, num_kv_heads, head_dim)| HeadGeometry {
        num_qo_heads,
        num_kv_heads,
        head_dim,
    })
}

/// Mostly usable configurations, so that the edits behind them run too.
fn config() -> impl Strategy<Value = PlanConfig> {
    let valid_heads = HeadGeometry { num_qo_heads: 4, num_kv_heads: 2, head_dim: 64 };
    let heads = prop_oneof![5 => Just(valid_heads), 1 => heads()];
    let option = || prop_oneof![4 => Just(None), 1 => size().prop_map(Some)];
    (
        (1usize..6, size()),
        (1usize..9, size()),
        any::<[bool; 2]>(),
        heads,
        option(),
        option(),
        option(),
        option(),
        any::<bool>(),
    )
        .prop_map(|(slots, pages, wild, heads, window, items, workers, splits, batch_invariant)| {
            let pick = |(usual, any): (usize, usize), is_wild: bool| if is_wild { any } else { usual };
            let (is_wild, also) = (wild[0] && wild[1], wild[0]);
            let mut config = PlanConfig::new(pick(slots, is_wild), pick(pages, is_wild), 20, 4, heads);
            config.page_size = if is_wild { pages.1 } else { 4 };
            config.window = window;
            config.num_work_items = items;
            config.num_workers = workers;
            config.num_splits = splits;
            config.waves = if also { 1 } else { 4 };
            config.batch_invariant = batch_invariant;
            config
        })
        // Valid, but slow to allocate over and over.
        .prop_filter("a small table", |config| config.max_slots < 100 && config.max_pages_per_slot < 10_000)
}

#[derive(Debug, Clone)]
enum Edit {
    Admit(Vec<u32>, usize, usize, Option<usize>),
    Retire(Slot),
    AppendPage(Slot, u32),
    ReplacePage(Slot, usize, u32),
    RetireHeadPages(Slot, usize, usize),
    Advance,
    EnsureWorkList,
    Rebuild(Vec<i32>, Vec<i32>, Vec<i32>, Option<Vec<i32>>, Option<Vec<i32>>),
}

fn slot() -> impl Strategy<Value = Slot> {
    let number = || prop_oneof![8 => 0u32..4, 1 => any::<u32>()];
    (number(), prop_oneof![4 => Just(0u32), 1 => number()])
        .prop_map(|(index, generation)| Slot { index, generation })
}

fn edit() -> impl Strategy<Value = Edit> {
    let indices = || prop::collection::vec(index(), 0..6);
    prop_oneof![
        4 => (prop::collection::vec(page(), 0..7), size(), size(), prop::option::of(size()))
            .prop_map(|(pages, tokens, offset, position)| Edit::Admit(pages, tokens, offset, position)),
        1 => slot().prop_map(Edit::Retire),
        3 => (slot(), page()).prop_map(|(slot, page)| Edit::AppendPage(slot, page)),
        1 => (slot(), size(), page()).prop_map(|(slot, index, page)| Edit::ReplacePage(slot, index, page)),
        2 => (slot(), size(), size()).prop_map(|(slot, pages, offset)| Edit::RetireHeadPages(slot, pages, offset)),
        3 => Just(Edit::Advance),
        1 => Just(Edit::EnsureWorkList),
        1 => (indices(), indices(), indices(), prop::option::of(indices()), prop::option::of(indices()))
            .prop_map(|(indptr, pages, last, offsets, positions)| Edit::Rebuild(indptr, pages, last, offsets, positions)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn plans_survive_any_edit(config in config(), edits in prop::collection::vec(edit(), 0..30)) {
        let Ok(mut plan) = DecodePlan::new(config) else { return Ok(()) };
        for edit in edits {
            let epoch = plan.epoch();
            let result = match edit.clone() {
                Edit::Admit(pages, tokens, offset, position) => plan.admit(&pages, tokens, offset, position).map(|_| ()),
                Edit::Retire(slot) => plan.retire(slot),
                Edit::AppendPage(slot, page) => plan.append_page(slot, page),
                Edit::ReplacePage(slot, index, page) => plan.replace_page(slot, index, page),
                Edit::RetireHeadPages(slot, pages, offset) => plan.retire_head_pages(slot, pages, offset),
                Edit::Advance => plan.advance(),
                Edit::EnsureWorkList => {
                    plan.ensure_work_list();
                    continue;
                }
                Edit::Rebuild(indptr, indices, last_page_len, offsets, positions) => {
                    let csr = CsrView {
                        indptr: &indptr,
                        indices: &indices,
                        last_page_len: &last_page_len,
                        first_page_offset: offsets.as_deref(),
                    };
                    plan.rebuild(csr, positions.as_deref()).map(|_| ())
                }
            };
            prop_assert_eq!(result.is_err(), plan.epoch() == epoch, "{:?} gave {:?}", edit, result);
            plan.validate().unwrap();
        }
        plan.ensure_work_list();
        plan.validate().unwrap();
    }

    #[test]
    fn imports_are_valid_or_refused(
        arrays in prop::array::uniform3(prop::collection::vec(index(), 0..6)),
        offsets in prop::option::of(prop::collection::vec(index(), 0..6)),
        num_pages in size(),
        page_size in size(),
    ) {
        let csr = CsrView {
            indptr: &arrays[0],
            indices: &arrays[1],
            last_page_len: &arrays[2],
            first_page_offset: offsets.as_deref(),
        };
        let heads = HeadGeometry { num_qo_heads: 1, num_kv_heads: 1, head_dim: 1 };
        if let Ok(plan) = DecodePlan::from_csr(csr, import_config(&csr, num_pages, page_size, heads)) {
            plan.validate().unwrap();
            prop_assert_eq!(plan.export_csr().indptr, &arrays[0][..]);
        }
    }

    #[test]
    fn pools_survive_any_call(num_pages in 0usize..12, calls in prop::collection::vec((0..3, prop::collection::vec(page(), 0..5)), 0..30)) {
        let Ok(pool) = PagePool::new(num_pages) else { return Ok(()) };
        for (call, pages) in calls {
            let _ = match call {
                0 => pool.acquire(pages.len()).map(|_| ()),
                1 => pool.retain(&pages),
                _ => pool.release(&pages),
            };
            pool.check_integrity().unwrap();
        }
    }

    #[test]
    fn tables_survive_any_call(page_size in size(), window in prop::option::of(size()), calls in prop::collection::vec((0..4, size()), 0..30)) {
        let pool = Arc::new(PagePool::new(16).unwrap());
        let Ok(mut table) = PageTable::new(Arc::clone(&pool), page_size, window) else { return Ok(()) };
        let mut forks = Vec::new();
        for (call, count) in calls {
            match call {
                0 => {
                    let (free, needed) = (pool.num_free(), table.pages_needed(count));
                    if table.append(count).is_ok() {
                        prop_assert!(needed.unwrap() >= free - pool.num_free());
                    } else {
                        prop_assert_eq!(free, pool.num_free());
                    }
                }
                1 => forks.push(table.fork().unwrap()),
                2 => drop(table.retire_head().unwrap()),
                _ => drop(forks.pop()),
            }
            table.check_integrity().unwrap();
            pool.check_integrity().unwrap();
        }
        drop((table, forks));
        prop_assert_eq!(pool.num_used(), 0);
    }

    #[test]
    fn budgets_and_shapes_survive_any_number(total in any::<u64>(), workspace in any::<u64>(), page in size(), heads in heads()) {
        if let Ok(budget) = BlockBudget::new(total, workspace, page as u64) {
            prop_assert!(budget.num_pages() * budget.page_bytes() <= total - workspace);
            let _ = budget.reserve(workspace);
            prop_assert_eq!(budget.num_reserved(), 0);
        }
        let is_usable = heads.check().is_ok();
        prop_assert!(!is_usable || heads.group_size() * heads.num_kv_heads == heads.num_qo_heads);
        let _ = PageGeometry::new(page).map(|geometry| (geometry.pages_for(total as usize), geometry.last_page_len(page)));
    }
}

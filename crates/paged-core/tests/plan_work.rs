//! Behaviour of the work list: how a batch is divided, how long that lasts, and its borders.

use paged_core::plan::{DecodePlan, FIXED_CHUNK_TOKENS, MIN_CHUNK_TOKENS, PlanConfig, WorkItem};
use paged_core::{Error, HeadGeometry, Slot};

const PAGE_SIZE: usize = 16;

fn heads(num_kv_heads: usize) -> HeadGeometry {
    HeadGeometry { num_qo_heads: 2 * num_kv_heads, num_kv_heads, head_dim: 64 }
}

fn config(num_kv_heads: usize, num_workers: usize) -> PlanConfig {
    let mut config = PlanConfig::new(64, 16_384, 1 << 20, PAGE_SIZE, heads(num_kv_heads));
    config.num_workers = Some(num_workers);
    config
}

fn admit(plan: &mut DecodePlan, length: usize) -> Slot {
    let pages = vec![1; (length + 4096).div_ceil(PAGE_SIZE)];
    plan.admit(&pages, length, 0, None).unwrap()
}

fn plan(config: PlanConfig, lengths: &[usize]) -> DecodePlan {
    let mut plan = DecodePlan::new(config).unwrap();
    for &length in lengths {
        admit(&mut plan, length);
    }
    plan.ensure_work_list();
    plan.validate().unwrap();
    plan
}

/// Tokens of each item, in list order.
fn sizes(plan: &DecodePlan) -> Vec<usize> {
    let items = plan.work().unwrap().items.iter();
    items
        .map(|item| item.tokens(plan.slot_row(item.slot as u32).unwrap().length, plan.config().window).len())
        .collect()
}

/// Time until the last of `num_workers` workers is done if each takes the next (item, head) unit as it gets free.
fn makespan(plan: &DecodePlan, num_workers: usize) -> usize {
    let mut busy_until = vec![0; num_workers];
    for size in sizes(plan) {
        for _ in 0..plan.config().heads.num_kv_heads {
            *busy_until.iter_mut().min().unwrap() += size;
        }
    }
    busy_until.into_iter().max().unwrap()
}

#[test]
fn workers_end_within_a_third_of_each_other() {
    let mixes: [&[usize]; 6] = [
        &[131_072],
        &[16_384; 3],
        &[65_536, 1024, 1024, 1024, 1024],
        &[700, 4096, 9001, 30_000],
        &[32_768, 16_384, 8192, 4096, 2048, 1024, 512, 256],
        &[2048; 33],
    ];
    for num_workers in [1, 2, 3, 8, 16, 96] {
        for num_kv_heads in [1, 2, 3, 8] {
            for lengths in mixes {
                let plan = plan(config(num_kv_heads, num_workers), lengths);
                let ideal = (lengths.iter().sum::<usize>() * num_kv_heads).div_ceil(num_workers);
                // Short chunks are not divided further, however many workers there are.
                let bound = ideal + (ideal / 3).max(MIN_CHUNK_TOKENS + PAGE_SIZE);
                let makespan = makespan(&plan, num_workers);
                assert!(
                    makespan <= bound,
                    "{num_workers} workers, {num_kv_heads} heads, {lengths:?}: {makespan} > {bound}"
                );
            }
        }
    }
}

#[test]
fn one_wave_stays_one_wave() {
    for (num_workers, num_kv_heads, lengths) in
        [(132, 8, vec![4096; 4]), (264, 8, vec![131_072]), (132, 4, vec![9001; 7])]
    {
        let plan = plan(PlanConfig { waves: 1, ..config(num_kv_heads, num_workers) }, &lengths);
        let units = plan.work().unwrap().items.len() * num_kv_heads;
        assert!(units <= num_workers, "{units} units on {num_workers} workers");
        assert!(units * 2 > num_workers, "{units} units leave {num_workers} workers idle");
    }
}

#[test]
fn equal_rows_get_equal_chunks_and_no_short_remainder() {
    for lengths in [vec![32_768; 4], vec![32_768; 8], vec![10_007; 5]] {
        let plan = plan(config(8, 128), &lengths);
        let sizes = sizes(&plan);
        let (longest, shortest) = (sizes.iter().max().unwrap(), sizes.iter().min().unwrap());
        assert!(longest - shortest <= PAGE_SIZE, "{shortest}..={longest}");
    }
}

#[test]
fn chunks_start_on_page_borders_and_come_longest_first() {
    let mut config = config(2, 16);
    config.page_size = 8;
    let mut plan = DecodePlan::new(config).unwrap();
    for (length, offset) in [(5000, 3), (900, 0), (20_000, 7)] {
        plan.admit(&vec![1; 4000], length, offset, None).unwrap();
    }
    plan.ensure_work_list();
    let mut last_size = usize::MAX;
    for (item, size) in plan.work().unwrap().items.iter().zip(sizes(&plan)) {
        let offset = plan.slot_row(item.slot as u32).unwrap().first_page_offset;
        assert!(item.kv_begin == 0 || (item.kv_begin as usize + offset).is_multiple_of(8));
        assert!(size <= last_size.saturating_add(PAGE_SIZE), "{size} after {last_size}");
        last_size = size;
    }
}

#[test]
fn short_rows_are_not_split() {
    let plan = plan(config(1, 64), &[MIN_CHUNK_TOKENS, 1, 0, 17]);
    let work = plan.work().unwrap();
    assert_eq!((work.items.len(), work.merges.len(), work.num_partial_rows), (4, 0, 0));
    let empty = work.items.iter().find(|item| item.out_row == 2).unwrap();
    let expected =
        WorkItem { slot: 2, kv_begin: 0, kv_end: WorkItem::OPEN_END, out_row: 2, flags: WorkItem::VALID };
    assert_eq!(*empty, expected);
}

#[test]
fn growth_inside_the_bound_needs_no_new_list() {
    let mut plan = plan(config(2, 8), &[4096; 4]);
    let items = plan.work().unwrap().items.to_vec();
    let mut num_splits = 0;
    for step in 0..2048 {
        plan.advance().unwrap();
        num_splits += usize::from(plan.ensure_work_list());
        if step < 64 {
            assert_eq!(plan.work().unwrap().items, items);
        }
    }
    assert!(num_splits <= 16, "{num_splits} splits in 2048 steps");
}

#[test]
fn a_list_older_than_its_rows_is_not_given_out() {
    let mut plan = plan(config(1, 1), &[100]);
    let slot = admit(&mut plan, 5);
    assert!(matches!(plan.work(), Err(Error::InvalidPlan { .. })));
    plan.ensure_work_list();
    assert_eq!(plan.work().unwrap().items.len(), 2);
    plan.retire(slot).unwrap();
    assert!(plan.work().is_err());
}

#[test]
fn num_splits_bounds_the_items_of_a_row() {
    for batch_invariant in [false, true] {
        for num_splits in [1, 2, 3, 7] {
            let config = PlanConfig { num_splits: Some(num_splits), batch_invariant, ..config(1, 64) };
            let plan = plan(config, &[100_000, 5000, 10]);
            let work = plan.work().unwrap();
            for slot in 0..3 {
                assert!(work.items.iter().filter(|item| item.slot == slot).count() <= num_splits);
            }
            // Fixed chunks keep one item in hand, as a row may start in the middle of one.
            let expected = if batch_invariant { num_splits - 1 } else { num_splits };
            let most = work.merges.iter().map(|merge| merge.num_partials as usize).max().unwrap_or(1);
            assert_eq!(most, expected.max(1));
        }
    }
}

#[test]
fn a_tight_list_is_respected() {
    for num_work_items in [64, 65, 70] {
        let mut plan =
            DecodePlan::new(PlanConfig { num_work_items: Some(num_work_items), ..config(1, 256) }).unwrap();
        for length in [50_000, 3000, 10] {
            admit(&mut plan, length);
        }
        for _ in 3..64 {
            plan.admit(&[1], 1, 0, None).unwrap();
        }
        plan.ensure_work_list();
        plan.validate().unwrap();
        assert!(plan.work().unwrap().items.len() <= num_work_items);
    }
}

#[test]
fn fixed_chunks_lie_at_absolute_positions() {
    let mut plan = DecodePlan::new(PlanConfig { batch_invariant: true, ..config(1, 1) }).unwrap();
    // The row starts at position 1000, inside the second chunk.
    plan.admit(&[1; 200], 2000, 0, Some(3000)).unwrap();
    plan.ensure_work_list();
    let begins: Vec<usize> = plan.work().unwrap().items.iter().map(|item| item.kv_begin as usize).collect();
    assert_eq!(begins, [0, 24, 536, 1048, 1560]);
    (0..72).for_each(|_| plan.advance().unwrap());
    assert!(!plan.ensure_work_list(), "position 3072 ends the sixth chunk");
    plan.advance().unwrap();
    assert!(plan.ensure_work_list());
    assert_eq!(plan.work().unwrap().items.len(), 6);
    assert_eq!(FIXED_CHUNK_TOKENS, 512);
}

/// However a row got to its length, it has the items of a row that came with it.
#[test]
fn fixed_chunks_do_not_depend_on_history() {
    let options = [(None, None), (None, Some(600)), (Some(2), None), (Some(2), Some(600)), (Some(3), None)];
    for (start, (num_splits, window)) in
        [0, 100, 511, 1000].map(|start| options.map(|option| (start, option))).concat()
    {
        let config = PlanConfig { batch_invariant: true, num_splits, window, max_slots: 1, ..config(1, 1) };
        let mut fresh = DecodePlan::new(config.clone()).unwrap();
        let mut grown = DecodePlan::new(config).unwrap();
        grown.admit(&[1; 200], 1, 0, Some(start + 1)).unwrap();
        for _ in 0..3000 {
            grown.advance().unwrap();
            grown.ensure_work_list();
            let csr = grown.export_csr();
            fresh.rebuild(csr.view(), Some(&csr.positions)).unwrap();
            let ranges = |plan: &DecodePlan| -> Vec<_> {
                plan.work()
                    .unwrap()
                    .items
                    .iter()
                    .map(|item| item.tokens(csr.lengths[0] as usize, window))
                    .collect()
            };
            assert_eq!(ranges(&grown), ranges(&fresh), "start {start}, {num_splits:?}, window {window:?}");
        }
    }
}

#[test]
fn a_window_is_divided_alone() {
    let plan = plan(PlanConfig { window: Some(1024), ..config(1, 4) }, &[100_000, 300]);
    let total: usize = sizes(&plan).iter().sum();
    assert_eq!(total, 1324);
    assert!(
        plan.work().unwrap().items.iter().filter(|item| item.slot == 0).all(|item| item.kv_begin >= 98_976)
    );
}

#[test]
fn configurations_out_of_range_name_the_argument() {
    let refused = |change: &dyn Fn(&mut PlanConfig)| {
        let mut config = config(2, 4);
        change(&mut config);
        match DecodePlan::new(config).err() {
            Some(Error::InvalidArgument { argument, .. }) => argument,
            other => panic!("{other:?}"),
        }
    };
    for value in [0, usize::MAX] {
        assert_eq!(refused(&|config| config.max_slots = value), "max_slots");
        assert_eq!(refused(&|config| config.max_pages_per_slot = value), "max_pages_per_slot");
        assert_eq!(refused(&|config| config.num_pages = value), "num_pages");
        assert_eq!(refused(&|config| config.page_size = value), "page_size");
        assert_eq!(refused(&|config| config.waves = value), "waves");
        assert_eq!(refused(&|config| config.window = Some(value)), "window");
        assert_eq!(refused(&|config| config.num_workers = Some(value)), "num_workers");
        assert_eq!(refused(&|config| config.num_splits = Some(value)), "num_splits");
        assert_eq!(refused(&|config| config.num_work_items = Some(value)), "num_work_items");
        assert_eq!(refused(&|config| config.heads.num_kv_heads = value), "num_kv_heads");
        assert_eq!(refused(&|config| config.heads.head_dim = value), "head_dim");
    }
    assert_eq!(refused(&|config| config.heads.num_qo_heads = 5), "num_qo_heads");
    assert_eq!(refused(&|config| config.num_work_items = Some(63)), "num_work_items");
    // 64 rows of 2^27 tokens do not fit an int32 index of page ids.
    assert_eq!(
        refused(&|config| (config.page_size, config.max_pages_per_slot) = (1, 1 << 27)),
        "max_pages_per_slot"
    );
    assert_eq!(
        refused(&|config| (config.batch_invariant, config.num_work_items) = (true, Some(64))),
        "num_work_items"
    );
}

//! The CUDA form of the work list, read as the kernel reads it.

use std::collections::HashMap;

use paged_core::plan::{
    DecodePlan, FIXED_CHUNK_TOKENS, PlanConfig, STREAM_IMBALANCE_BOUND, STREAM_QUANTUM_TOKENS, StreamItem,
    StreamList,
};
use paged_core::{Error, HeadGeometry};
use proptest::prelude::*;

const PAGE_SIZE: usize = 16;
const MAX_ROWS: usize = 40;
const MAX_TOKENS: usize = 6000;
const MAX_STEPS: usize = 300;

#[derive(Debug, Clone)]
struct Batch {
    /// Tokens, first page offset, tokens before the held ones, whether the row leaves before the list is made.
    rows: Vec<(usize, usize, usize, bool)>,
    window: Option<usize>,
    num_splits: Option<usize>,
    batch_invariant: bool,
    num_workers: usize,
}

fn batches() -> impl Strategy<Value = Batch> {
    let row = (0..MAX_TOKENS, 0..PAGE_SIZE, 0..2000_usize, prop::bool::weighted(0.2));
    (
        prop::collection::vec(row, 0..MAX_ROWS),
        prop::option::of(1..3000_usize),
        prop::option::of(1..9_usize),
        any::<bool>(),
        1..70_usize,
    )
        .prop_map(|(rows, window, num_splits, batch_invariant, num_workers)| Batch {
            rows,
            window,
            num_splits,
            batch_invariant,
            num_workers,
        })
}

fn plan(batch: &Batch) -> DecodePlan {
    let heads = HeadGeometry { num_qo_heads: 8, num_kv_heads: 2, head_dim: 64 };
    let max_pages = (MAX_TOKENS + MAX_STEPS).div_ceil(PAGE_SIZE) + 1;
    let config = PlanConfig {
        window: batch.window,
        num_splits: batch.num_splits,
        batch_invariant: batch.batch_invariant,
        num_workers: Some(8),
        ..PlanConfig::new(MAX_ROWS, max_pages, 10, PAGE_SIZE, heads)
    };
    let mut plan = DecodePlan::new(config).unwrap();
    let mut leaving = Vec::new();
    for &(length, offset, before, leaves) in &batch.rows {
        let offset = if length == 0 { 0 } else { offset };
        let pages = vec![1; (length + offset + MAX_STEPS).div_ceil(PAGE_SIZE)];
        let slot = plan.admit(&pages, length, offset, Some(before + length)).unwrap();
        if leaves {
            leaving.push(slot);
        }
    }
    for slot in leaving {
        plan.retire(slot).unwrap();
    }
    plan
}

fn argument(error: Error) -> &'static str {
    match error {
        Error::InvalidArgument { argument, .. } => argument,
        other => panic!("{other:?} is not about an argument"),
    }
}

/// Tokens that the kernel reads for an item now.
fn tokens(plan: &DecodePlan, item: &StreamItem) -> std::ops::Range<usize> {
    let length = plan.slot_row(item.slot as u32).unwrap().length;
    let visible = plan.config().window.map_or(0, |window| length.saturating_sub(window));
    let begin = visible.max(item.kv_begin as usize);
    let end = if item.flags & StreamItem::OPEN_END != 0 { length } else { length.min(item.kv_end as usize) };
    begin..end.max(begin)
}

/// Items of each worker, up to the first that is not valid.
fn workers(list: &StreamList) -> Vec<Vec<StreamItem>> {
    let column = |worker: usize| {
        let items = list.items.iter().skip(worker).step_by(list.num_workers);
        items.take_while(|item| item.flags & StreamItem::VALID != 0).copied().collect()
    };
    (0..list.num_workers).map(column).collect()
}

fn worker_tokens(plan: &DecodePlan, list: &StreamList) -> Vec<usize> {
    workers(list).iter().map(|items| items.iter().map(|item| tokens(plan, item).len()).sum()).collect()
}

/// Checks what holds for every list: coverage, numbering, padding.
fn check(plan: &DecodePlan, list: &StreamList) {
    let mut rows: HashMap<i32, Vec<StreamItem>> = HashMap::new();
    let reached: Vec<_> = workers(list).into_iter().flatten().collect();
    let num_unused = list.items.iter().filter(|item| **item == StreamItem::default()).count();
    assert_eq!(reached.len() + num_unused, list.items.len(), "an item behind padding, or padding not 0");
    for item in reached {
        rows.entry(item.out_row).or_default().push(item);
    }
    assert_eq!(rows.len(), plan.num_rows());
    let mut partial_rows = Vec::new();
    for (row, mut items) in rows {
        items.sort_by_key(|item| item.split);
        let view = plan.row(row as usize).unwrap();
        let visible = plan.config().window.map_or(0, |window| view.length.saturating_sub(window));
        let mut next = visible;
        for (split, item) in items.iter().enumerate() {
            let is_last = split + 1 == items.len();
            assert_eq!((item.slot, item.split), (view.slot as i32, split as i32));
            assert_eq!(item.num_splits as usize, items.len());
            assert_eq!(item.flags & StreamItem::OPEN_END != 0, is_last);
            let covered = tokens(plan, item);
            if !covered.is_empty() {
                assert_eq!(covered.start, next, "row {row}: a gap or an overlap");
                next = covered.end;
            }
            if items.len() > 1 {
                assert_eq!(item.partial_row, items[0].partial_row + split as i32);
                partial_rows.push(item.partial_row as usize);
            }
        }
        assert_eq!(next, view.length);
        assert!(plan.config().num_splits.is_none_or(|splits| items.len() <= splits));
    }
    partial_rows.sort_unstable();
    assert!(partial_rows.into_iter().eq(0..list.num_partial_rows));
    if plan.config().batch_invariant {
        assert!(list.num_partial_rows <= plan.num_work_items());
    } else {
        assert!(list.num_partial_rows < 2 * list.num_workers);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_visible_token_is_read_once_now_and_after_growth(batch in batches(), num_steps in 1..MAX_STEPS) {
        let mut plan = plan(&batch);
        let epoch = plan.epoch();
        let list = plan.stream_items(batch.num_workers, None).unwrap();
        prop_assert_eq!(plan.epoch(), epoch);
        check(&plan, &list);
        (0..num_steps).for_each(|_| plan.advance().unwrap());
        check(&plan, &list);
        check(&plan, &plan.stream_items(batch.num_workers, None).unwrap());
    }

    #[test]
    fn no_worker_has_much_more_than_its_share(batch in batches()) {
        let batch = Batch { num_splits: None, batch_invariant: false, ..batch };
        let mut plan = plan(&batch);
        let list = plan.stream_items(batch.num_workers, None).unwrap();
        let fresh = worker_tokens(&plan, &list);
        let longest = fresh.iter().max().copied().unwrap();
        // In whole quanta, of which a row may fill the first and last partly, and a cut moves by 2 % at either side.
        let quanta: usize = (0..plan.num_rows())
            .map(|row| {
                let view = plan.row(row).unwrap();
                let visible = batch.window.map_or(0, |window| view.length.saturating_sub(window));
                let end = (view.first_page_offset + view.length).div_ceil(STREAM_QUANTUM_TOKENS);
                let begin = (view.first_page_offset + visible) / STREAM_QUANTUM_TOKENS;
                if view.length == 0 { 0 } else { end - begin }
            })
            .sum();
        let share = (quanta * STREAM_QUANTUM_TOKENS).div_ceil(batch.num_workers);
        prop_assert!(longest <= share + share / 25 + STREAM_QUANTUM_TOKENS, "{longest} of {share}");

        let num_steps = list.num_steps.min(MAX_STEPS);
        (0..num_steps).for_each(|_| plan.advance().unwrap());
        let mean_growth = if batch.window.is_none() { num_steps * plan.num_rows() } else { 0 };
        let (above, below) = STREAM_IMBALANCE_BOUND;
        let bound = above * (longest * batch.num_workers + mean_growth)
            + below * batch.num_workers * STREAM_QUANTUM_TOKENS / 2;
        let grown = worker_tokens(&plan, &list).into_iter().max().unwrap();
        prop_assert!(grown * below * batch.num_workers <= bound);
        if list.num_steps < MAX_STEPS && batch.window.is_none() {
            plan.advance().unwrap();
            let grown = worker_tokens(&plan, &list).into_iter().max().unwrap();
            prop_assert!(grown * below * batch.num_workers > bound + above * plan.num_rows(), "a step too early");
        }
    }

    #[test]
    fn a_batch_invariant_row_is_cut_alike_in_every_batch(batch in batches(), num_workers in 1..70_usize) {
        let batch = Batch { batch_invariant: true, ..batch };
        let together = plan(&batch);
        let list = together.stream_items(batch.num_workers, None).unwrap();
        let rows = batch.rows.iter().filter(|row| !row.3);
        for (row, &alone) in rows.enumerate() {
            let plan = plan(&Batch { rows: vec![alone], ..batch.clone() });
            let cuts = |list: &StreamList, row: usize| {
                let mut cuts: Vec<_> = list
                    .items
                    .iter()
                    .filter(|item| item.flags != 0 && item.out_row as usize == row)
                    .map(|item| (item.split, item.num_splits, item.kv_begin, item.kv_end))
                    .collect();
                cuts.sort_unstable();
                cuts
            };
            prop_assert_eq!(cuts(&plan.stream_items(num_workers, None).unwrap(), 0), cuts(&list, row));
        }
    }

    #[test]
    fn the_fewest_items_suffice_and_one_less_is_refused(batch in batches()) {
        let plan = plan(&batch);
        let list = plan.stream_items(batch.num_workers, None).unwrap();
        let used = list.items.iter().rposition(|item| item.flags != 0).map_or(0, |last| last + 1);
        prop_assume!(used > 1);
        let shortest = plan.stream_items(batch.num_workers, Some(used)).unwrap();
        prop_assert_eq!(&shortest.items, &list.items[..used]);
        let refused = plan.stream_items(batch.num_workers, Some(used - 1));
        prop_assert_eq!(refused.map_err(argument).unwrap_err(), "num_items");
    }
}

fn unbounded(lengths: &[usize], num_workers: usize) -> Batch {
    Batch {
        rows: lengths.iter().map(|&length| (length, 0, 0, false)).collect(),
        window: None,
        num_splits: None,
        batch_invariant: false,
        num_workers,
    }
}

#[test]
fn few_long_rows_use_every_worker_and_uniform_ones_stay_whole() {
    for (lengths, num_workers) in [(vec![1024], 8), (vec![4096], 16), (vec![4096; 4], 16)] {
        let batch = unbounded(&lengths, num_workers);
        let list = plan(&batch).stream_items(num_workers, None).unwrap();
        assert!(workers(&list).iter().all(|items| items.len() == 1), "{lengths:?} on {num_workers}");
    }
    let whole = plan(&unbounded(&[4096; 32], 16)).stream_items(16, None).unwrap();
    assert_eq!((whole.num_partial_rows, whole.num_steps), (0, usize::MAX));
}

#[test]
fn fixed_chunks_lie_at_absolute_positions() {
    let row = (2000, 0, 100, false);
    let batch = Batch { rows: vec![row], batch_invariant: true, ..unbounded(&[], 3) };
    let list = plan(&batch).stream_items(3, None).unwrap();
    let begins: Vec<_> = list.items.iter().filter(|item| item.flags != 0).map(|item| item.kv_begin).collect();
    let chunk = FIXED_CHUNK_TOKENS as i32;
    assert_eq!(begins, [0, chunk - 100, 2 * chunk - 100, 3 * chunk - 100, 4 * chunk - 100]);
    assert_eq!(list.num_steps, 5 * FIXED_CHUNK_TOKENS - 2100);
}

#[test]
fn counts_out_of_range_are_refused_by_name() {
    let plan = plan(&unbounded(&[5], 1));
    for (num_workers, num_items, name) in
        [(0, None, "num_workers"), (usize::MAX, None, "num_workers"), (1, Some(0), "num_items")]
    {
        assert_eq!(plan.stream_items(num_workers, num_items).map_err(argument), Err(name));
    }
}

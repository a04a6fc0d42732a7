//! Cost of keeping a decode plan up to date: `cargo bench plan-update`.
//!
//! Each operation is timed as a step takes it, with the lazy division of the work list where it is due:
//! `advance` a step without page crossing; `crossing_one`, `crossing_all` a step in which one row, every row gets a page;
//! `admit`, `retire` one sequence coming, going; `rebuild` the whole state from CSR arrays.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion};
use paged_core::plan::{Csr, DecodePlan, PlanConfig};
use paged_core::{HeadGeometry, Slot};

const PAGE_SIZE: usize = 32;
const BATCHES: [usize; 6] = [1, 4, 16, 64, 256, 1024];
const CONTEXTS: [usize; 3] = [1 << 10, 1 << 14, 1 << 17];

/// Pages beyond the context that each row holds from the start, so that steps run on, and as many that it can still get.
const SPARE_PAGES: usize = 256;

/// A plan in its initial state, and the way back to it.
struct Batch {
    plan: DecodePlan,
    slots: Vec<Slot>,
    pages: Vec<Vec<u32>>,
    context: usize,
}

impl Batch {
    fn new(batch: usize, context: usize) -> Self {
        let held = context / PAGE_SIZE + SPARE_PAGES;
        let heads = HeadGeometry { num_qo_heads: 32, num_kv_heads: 8, head_dim: 128 };
        let config = PlanConfig::new(batch + 1, held + SPARE_PAGES, (batch + 1) * held, PAGE_SIZE, heads);
        let plan = DecodePlan::new(config).expect("the grid's sizes are valid");
        let pages = (0..=batch)
            .map(|row| (0..held).map(|page| (page * (batch + 1) + row) as u32).collect())
            .collect();
        let mut batch = Self { plan, slots: Vec::new(), pages, context };
        batch.reset();
        batch
    }

    fn reset(&mut self) {
        for slot in self.slots.drain(..) {
            self.plan.retire(slot).expect("the slot is live");
        }
        for pages in &self.pages[1..] {
            self.slots.push(self.plan.admit(pages, self.context, 0, None).expect("the plan has room"));
        }
        self.plan.ensure_work_list();
    }

    fn step(&mut self) {
        self.plan.advance().expect("rows have spare pages");
        self.plan.ensure_work_list();
    }

    fn cross(&mut self, row: usize) {
        self.plan.append_page(self.slots[row], self.pages[0][0]).expect("rows have spare capacity");
    }

    /// Times `count` calls of `operation`, going back to the initial state, untimed, after every `limit` calls.
    fn time(&mut self, count: u64, limit: usize, mut operation: impl FnMut(&mut Self, usize)) -> Duration {
        let mut total = Duration::ZERO;
        let mut left = count;
        while left > 0 {
            self.reset();
            let calls = left.min(limit as u64);
            let start = Instant::now();
            for call in 0..calls {
                operation(self, call as usize);
            }
            total += start.elapsed();
            left -= calls;
        }
        total
    }

    fn csr(&self) -> Csr {
        self.plan.export_csr()
    }
}

fn define(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan-update");
    group.sample_size(10).nresamples(1000);
    group.warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(400));
    for batch_size in BATCHES {
        for context in CONTEXTS {
            let id =
                |operation: &str| BenchmarkId::new(operation, format!("{batch_size}x{}K", context >> 10));
            let mut batch = Batch::new(batch_size, context);
            group.bench_function(id("advance"), |bencher| {
                bencher
                    .iter_custom(|count| batch.time(count, SPARE_PAGES * PAGE_SIZE, |batch, _| batch.step()));
            });
            group.bench_function(id("crossing_one"), |bencher| {
                bencher.iter_custom(|count| {
                    batch.time(count, SPARE_PAGES, |batch, call| {
                        batch.cross(call % batch_size);
                        batch.step();
                    })
                });
            });
            group.bench_function(id("crossing_all"), |bencher| {
                bencher.iter_custom(|count| {
                    batch.time(count, SPARE_PAGES, |batch, _| {
                        (0..batch_size).for_each(|row| batch.cross(row));
                        batch.step();
                    })
                });
            });
            batch.reset();
            bench_composition(&mut group, &id, &mut batch);
            let csr = batch.csr();
            group.bench_function(id("rebuild"), |bencher| {
                bencher.iter(|| {
                    black_box(batch.plan.rebuild(csr.view(), None).expect("the arrays are valid").len())
                });
            });
        }
    }
    group.finish();
}

/// One sequence more, and it leaves again; each half timed on its own.
fn bench_composition(
    group: &mut criterion::BenchmarkGroup<'_, criterion::measurement::WallTime>,
    id: &impl Fn(&str) -> BenchmarkId,
    batch: &mut Batch,
) {
    let pages = &batch.pages[0];
    for operation in ["admit", "retire"] {
        group.bench_function(id(operation), |bencher| {
            bencher.iter_custom(|count| {
                let mut total = Duration::ZERO;
                for _ in 0..count {
                    let start = Instant::now();
                    let slot = batch.plan.admit(pages, batch.context, 0, None).expect("one slot is free");
                    batch.plan.ensure_work_list();
                    let middle = Instant::now();
                    batch.plan.retire(slot).expect("the slot is live");
                    batch.plan.ensure_work_list();
                    total += if operation == "admit" { middle - start } else { middle.elapsed() };
                }
                total
            });
        });
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    define(&mut criterion);
    criterion.final_summary();
}

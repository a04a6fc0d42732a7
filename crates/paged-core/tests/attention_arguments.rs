//! Bad arguments give errors that name them, never a panic or an access outside the arrays.

mod oracle;

use oracle::{Case, Shape, new_tokens};
use paged_core::attention::{
    Array, AttentionArguments, AttentionParams, DecodeBatch, Executor, PagedSequence, PoolLayout, SimdLevel,
    WorkItem, decode, memory_roof, prefill, write_decode, write_pages,
};
use paged_core::{Error, Result};
use proptest::prelude::*;

/// A good launch of 2 rows, 4 query heads over 2 KV heads of 32, 6 pages of 8 tokens, that a test spoils.
struct Good {
    q: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    sinks: Vec<f32>,
}

const SHAPE: [usize; 3] = [2, 4, 32];
const POOL: [usize; 4] = [6, 2, 8, 32];

impl Good {
    fn new() -> Self {
        let pool = POOL.iter().product();
        Self {
            q: vec![0.5; 256],
            out: vec![0.0; 256],
            lse: vec![0.0; 8],
            k: vec![1.0; pool],
            v: vec![2.0; pool],
            sinks: vec![0.0; 4],
        }
    }

    fn arguments(&mut self) -> AttentionArguments<'_> {
        AttentionArguments {
            q: Array::from_slice("q", &self.q, SHAPE, None).unwrap(),
            out: Array::from_slice_mut("out", &mut self.out, SHAPE, None).unwrap(),
            lse: Some(Array::from_slice_mut("lse", &mut self.lse, [2, 4], None).unwrap()),
            k_pages: Array::from_slice_mut("k_pages", &mut self.k, POOL, None).unwrap(),
            v_pages: Array::from_slice_mut("v_pages", &mut self.v, POOL, None).unwrap(),
            new: None,
            layout: PoolLayout::Hnd,
            params: AttentionParams {
                sm_scale: 1.0,
                logits_soft_cap: 0.0,
                sinks: Some(Array::from_slice("sinks", &self.sinks, [4], None).unwrap()),
                window: None,
            },
        }
    }
}

fn executor() -> Executor {
    Executor::new(SimdLevel::detect(), 1).unwrap()
}

fn rows() -> Vec<PagedSequence<'static>> {
    vec![
        PagedSequence { page_ids: &[5, 0], first_page_offset: 3, num_tokens: 13 },
        PagedSequence { page_ids: &[2], first_page_offset: 0, num_tokens: 8 },
    ]
}

fn run(arguments: &AttentionArguments<'_>) -> Result<()> {
    decode(&executor(), arguments, &DecodeBatch::unsplit(rows()))
}

#[track_caller]
fn assert_names(result: Result<()>, argument: &str) {
    match result {
        Err(Error::InvalidArgument { argument: found, .. } | Error::InvalidType { argument: found, .. }) => {
            assert_eq!(found, argument);
        }
        other => panic!("expected an error of {argument}, got {other:?}"),
    }
}

#[test]
fn the_good_launch_is_good() {
    let mut good = Good::new();
    run(&good.arguments()).unwrap();
    assert!(good.out.iter().all(|x| *x > 0.0));
}

#[test]
fn errors_name_the_argument() {
    let data = vec![0.0_f32; 4096];
    let halves = vec![half::f16::ZERO; 4096];
    let array3 = |shape| Array::from_slice("q", &data, shape, None).unwrap();
    let mut good = Good::new();
    for shape in [[2, 4, 16], [3, 4, 32], [2, 3, 32], [2, 0, 32], [2, 34, 32], [0, 4, 32]] {
        let arguments = AttentionArguments { q: array3(shape), ..good.arguments() };
        assert_names(run(&arguments), "q");
    }
    let strided = Array::from_slice("q", &data, SHAPE, Some([256, 64, 2])).unwrap();
    assert_names(run(&AttentionArguments { q: strided, ..good.arguments() }), "q");

    let mut other = vec![0.0_f32; 1024];
    let out = Array::from_slice_mut("out", &mut other, [2, 4, 16], None).unwrap();
    assert_names(run(&AttentionArguments { out, ..good.arguments() }), "out");
    let out = Array::from_slice("out", &data, SHAPE, None).unwrap();
    assert_names(run(&AttentionArguments { out, ..good.arguments() }), "out");
    for strides in [[0, 32, 1], [64, 32, 1], [128, 31, 1]] {
        let out = Array::from_slice_mut("out", &mut other, SHAPE, Some(strides)).unwrap();
        assert_names(run(&AttentionArguments { out, ..good.arguments() }), "out");
    }
    let mut wrong = vec![half::f16::ZERO; 256];
    let out = Array::from_slice_mut("out", &mut wrong, SHAPE, None).unwrap();
    assert_names(run(&AttentionArguments { out, ..good.arguments() }), "out");

    let mut wrong = vec![half::f16::ZERO; 8];
    let lse = Some(Array::from_slice_mut("lse", &mut wrong, [2, 4], None).unwrap());
    assert_names(run(&AttentionArguments { lse, ..good.arguments() }), "lse");
    let lse = Some(Array::from_slice_mut("lse", &mut other, [4, 2], None).unwrap());
    assert_names(run(&AttentionArguments { lse, ..good.arguments() }), "lse");

    for shape in [[6, 2, 8, 0], [6, 2, 8, 24], [1, 1, 2, 528], [6, 0, 8, 32], [6, 2, 0, 32]] {
        let k_pages = Array::from_slice("k_pages", &data, shape, None).unwrap();
        assert_names(run(&AttentionArguments { k_pages, ..good.arguments() }), "k_pages");
    }
    let k_pages = Array::from_slice("k_pages", &data, [1, 1, 1 << 17, 32], Some([0, 0, 0, 1])).unwrap();
    assert_names(run(&AttentionArguments { k_pages, ..good.arguments() }), "k_pages");
    let v_pages = Array::from_slice("v_pages", &data, [5, 2, 8, 32], None).unwrap();
    assert_names(run(&AttentionArguments { v_pages, ..good.arguments() }), "v_pages");
    let v_pages = Array::from_slice("v_pages", &halves, POOL, None).unwrap();
    assert_names(run(&AttentionArguments { v_pages, ..good.arguments() }), "v_pages");

    for sm_scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut arguments = good.arguments();
        arguments.params.sm_scale = sm_scale;
        assert_names(run(&arguments), "sm_scale");
    }
    for cap in [f32::NAN, f32::INFINITY, -1.0] {
        let mut arguments = good.arguments();
        arguments.params.logits_soft_cap = cap;
        assert_names(run(&arguments), "logits_soft_cap");
    }
    let mut arguments = good.arguments();
    arguments.params.window = Some(0);
    assert_names(run(&arguments), "window");
    let mut arguments = good.arguments();
    arguments.params.sinks = Some(Array::from_slice("sinks", &data, [3], None).unwrap());
    assert_names(run(&arguments), "sinks");
    assert!(good.out.iter().all(|x| *x == 0.0), "nothing is written on an error");
}

#[test]
fn outputs_that_overlap_inputs_are_refused() {
    let mut memory = vec![1.0_f32; 4096];
    let mut good = Good::new();
    // SAFETY: the memory outlives the launches, which are refused before they touch it.
    let at = |offset: usize, name, shape: [usize; 3]| unsafe {
        let data = memory.as_ptr().cast_mut().add(offset).cast();
        let strides = [(shape[1] * shape[2]) as isize, shape[2] as isize, 1];
        Array::from_raw(name, data, paged_core::attention::ElementType::F32, shape, strides, true).unwrap()
    };
    for offset in [0, 1, 255] {
        let arguments =
            AttentionArguments { q: at(0, "q", SHAPE), out: at(offset, "out", SHAPE), ..good.arguments() };
        assert_names(run(&arguments), "out");
    }
    let arguments =
        AttentionArguments { q: at(0, "q", SHAPE), out: at(256, "out", SHAPE), ..good.arguments() };
    run(&arguments).unwrap();
    memory.fill(0.0);
}

#[test]
fn page_tables_are_checked_against_the_pool() {
    let table = |page_ids: &'static [i32], first_page_offset, num_tokens| PagedSequence {
        page_ids,
        first_page_offset,
        num_tokens,
    };
    let cases = [
        (table(&[0, 6], 0, 9), "page_ids"),
        (table(&[-1], 0, 1), "page_ids"),
        (table(&[i32::MIN], 0, 1), "page_ids"),
        (table(&[0], 8, 1), "first_page_offset"),
        (table(&[0], 7, 2), "num_tokens"),
        (table(&[], 0, 1), "num_tokens"),
        (table(&[0], 1, usize::MAX), "num_tokens"),
    ];
    for (bad, argument) in cases {
        let mut good = Good::new();
        let batch = DecodeBatch::unsplit(vec![rows()[0], bad]);
        assert_names(decode(&executor(), &good.arguments(), &batch), argument);
        assert_names(prefill(&executor(), &good.arguments(), bad), argument);
    }
    // More queries than tokens, and pages beyond the needed ones that are never read.
    let mut good = Good::new();
    assert_names(prefill(&executor(), &good.arguments(), table(&[0], 0, 1)), "num_tokens");
    prefill(&executor(), &good.arguments(), table(&[0, 77, -5], 0, 8)).unwrap();
}

#[test]
fn work_lists_that_miss_or_repeat_tokens_are_refused() {
    let item = |row, begin, end| WorkItem { row, begin, end };
    let lists = [
        vec![],
        vec![item(0, 0, usize::MAX)],
        vec![item(0, 0, 12), item(1, 0, 8)],
        vec![item(0, 0, 13), item(0, 5, 6), item(1, 0, 8)],
        vec![item(0, 0, 13), item(1, 0, 8), item(2, 0, 1)],
        vec![item(usize::MAX, 0, 1)],
    ];
    for items in lists {
        let mut good = Good::new();
        let result = decode(&executor(), &good.arguments(), &DecodeBatch { rows: rows(), items });
        assert!(matches!(result, Err(Error::InvalidPlan { .. })), "{result:?}");
    }
}

#[test]
fn executors_and_roofs_check_their_numbers() {
    assert_names(Executor::new(SimdLevel::detect(), 0).map(|_| ()), "num_threads");
    let missing = if cfg!(target_arch = "aarch64") { SimdLevel::Avx2 } else { SimdLevel::Neon };
    assert_names(Executor::new(missing, 1).map(|_| ()), "simd");
    assert_names(memory_roof(&executor(), 1000, 1).map(|_| ()), "num_bytes");
    assert_names(memory_roof(&executor(), 1 << 20, 0).map(|_| ()), "repeats");
    assert!(matches!(memory_roof(&executor(), usize::MAX, 1), Err(Error::AllocationFailed { .. })));
    assert!(memory_roof(&executor(), 1 << 22, 2).unwrap() > 0.0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Arrays over slices: whatever the shape and strides, an accepted array stays inside its slice.
    #[test]
    fn arrays_never_reach_outside_their_slice(
        shape in prop::array::uniform3(prop_oneof![0_usize..6, any::<usize>()]),
        strides in prop::array::uniform3(prop_oneof![-40_isize..40, any::<isize>()]),
        len in 0_usize..200,
    ) {
        let data = vec![0.0_f32; len];
        let offsets = (0..3).map(|i| (shape[i] as i128 - 1) * strides[i] as i128);
        // Three products of 64-bit numbers can pass 128 bits.
        let (low, high) = offsets.fold((0_i128, 0_i128), |(low, high), reach| {
            (low.saturating_add(reach.min(0)), high.saturating_add(reach.max(0)))
        });
        let is_inside = shape.contains(&0) || (low >= 0 && high < len as i128);
        let is_accepted = Array::from_slice("a", &data, shape, Some(strides)).is_ok();
        prop_assert!(is_inside || !is_accepted);
        // A dimension beyond isize is refused even if its stride is 0.
        let fits = shape.iter().all(|n| isize::try_from(*n).is_ok());
        prop_assert!(is_accepted || !is_inside || !fits);
    }

    /// Random launches: an error or a finite result, and never a panic.
    #[test]
    fn launches_survive_random_arguments(
        num_rows in 0_usize..4,
        heads in 0_usize..40,
        kv_heads in 0_usize..4,
        dim in prop_oneof![Just(16_usize), Just(64), 0_usize..90],
        page_size in 0_usize..9,
        num_pages in 0_usize..4,
        ids in prop::collection::vec(-2_i32..5, 0..6),
        offset in 0_usize..10,
        num_tokens in prop_oneof![0_usize..30, any::<usize>()],
        items in prop::collection::vec((0_usize..4, 0_usize..30, 0_usize..40), 0..5),
        is_unsplit in any::<bool>(),
        sm_scale in prop_oneof![Just(0.5_f32), any::<f32>()],
        cap in prop_oneof![Just(0.0_f32), any::<f32>()],
        window in prop_oneof![Just(None), Just(Some(0)), (1_usize..40).prop_map(Some), Just(Some(usize::MAX))],
        is_nhd in any::<bool>(),
        has_new in any::<bool>(),
        has_sinks in any::<bool>(),
    ) {
        let layout = if is_nhd { PoolLayout::Nhd } else { PoolLayout::Hnd };
        let pool = match layout {
            PoolLayout::Nhd => [num_pages, page_size, kv_heads, dim],
            PoolLayout::Hnd => [num_pages, kv_heads, page_size, dim],
        };
        let shape = [num_rows, heads, dim];
        let (q, sinks) = (vec![0.1_f32; shape.iter().product()], vec![0.0_f32; heads]);
        let mut out = vec![0.0_f32; q.len()];
        let (mut k, mut v) = (vec![0.2_f32; pool.iter().product()], vec![0.3_f32; pool.iter().product()]);
        let new = vec![0.4_f32; num_rows * kv_heads * dim];
        let arguments = AttentionArguments {
            q: Array::from_slice("q", &q, shape, None).unwrap(),
            out: Array::from_slice_mut("out", &mut out, shape, None).unwrap(),
            lse: None,
            k_pages: Array::from_slice_mut("k_pages", &mut k, pool, None).unwrap(),
            v_pages: Array::from_slice_mut("v_pages", &mut v, pool, None).unwrap(),
            new: has_new.then(|| new_tokens(&new, &new, [num_rows, kv_heads, dim])),
            layout,
            params: AttentionParams {
                sm_scale,
                logits_soft_cap: cap,
                sinks: has_sinks.then(|| Array::from_slice("sinks", &sinks, [heads], None).unwrap()),
                window,
            },
        };
        let sequence = PagedSequence { page_ids: &ids, first_page_offset: offset, num_tokens };
        let batch = if is_unsplit {
            DecodeBatch::unsplit(vec![sequence; num_rows])
        } else {
            let items = items.iter().map(|&(row, begin, end)| WorkItem { row, begin, end }).collect();
            DecodeBatch { rows: vec![sequence; num_rows], items }
        };
        let decoded = decode(&executor(), &arguments, &batch);
        let prefilled = prefill(&executor(), &arguments, sequence);
        if let Some(new) = &arguments.new {
            let (k, v) = (&arguments.k_pages, &arguments.v_pages);
            let _ = write_pages(&executor(), new, k, v, layout, sequence);
            let _ = write_decode(&executor(), new, k, v, layout, &batch);
        }
        if sm_scale.abs() < 1e3 && (decoded.is_ok() || prefilled.is_ok()) {
            prop_assert!(out.iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn rows_may_share_pages() {
    // Forked sequences read the same pages; nothing in a launch minds.
    let mut shared = Case::<f32>::random(Shape::new(8, 64, 1, 2, &[20, 20]), 1);
    shared.page_ids[1] = shared.page_ids[0].clone();
    shared.q.copy_within(0..128, 128);
    let found = shared.decode(&executor(), 2);
    assert_eq!(found.out[..128], found.out[128..]);
}

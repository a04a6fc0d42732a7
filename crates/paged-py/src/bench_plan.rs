//! Step-level timings of the plan's own methods, taken in Rust so that no interpreter time is in them.

use std::hint::black_box;
use std::time::Instant;

use paged_core::HeadGeometry;
use paged_core::plan::{Csr, DecodePlan, PlanConfig};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::buffer::count;
use crate::errors::CoreResult;

/// Times the updates of a plan of `batch` rows of `context` tokens: medians over `repeats` samples, in nanoseconds.
///
/// `advance_ns` is a step without page crossing, `crossing_one_ns` and `crossing_all_ns` whole steps in which one row or every
/// row gets a page, `rebuild_ns` the same state built from CSR arrays.
#[pyfunction]
#[pyo3(signature = (batch, context, page_size, *, repeats = None))]
pub(crate) fn bench_plan<'py>(
    py: Python<'py>,
    batch: &Bound<'py, PyAny>,
    context: &Bound<'py, PyAny>,
    page_size: &Bound<'py, PyAny>,
    repeats: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let (batch, context, page_size) =
        (count("batch", batch)?, count("context", context)?, count("page_size", page_size)?);
    let repeats = repeats.map_or(Ok(301), |repeats| count("repeats", repeats))?;
    let timings = py.detach(|| measure(batch, context, page_size, repeats.clamp(1, 100_000)))?;
    let result = PyDict::new(py);
    for (name, nanoseconds) in timings {
        result.set_item(name, nanoseconds)?;
    }
    Ok(result)
}

type Timings = Vec<(&'static str, f64)>;

/// Steps per sample: a single step takes less time than reading the clock.
const STEPS: usize = 16;

/// Most samples of the operations that take micro- to milliseconds.
const FEW: usize = 15;

fn measure(batch: usize, context: usize, page_size: usize, repeats: usize) -> CoreResult<Timings> {
    let heads = HeadGeometry { num_qo_heads: 32, num_kv_heads: 8, head_dim: 128 };
    let few = repeats.min(FEW);
    // Pages that the timed steps grow into, so that none of them fails.
    let num_steps = 2 * repeats * STEPS + 2 * few;
    let held_pages = context.saturating_add(num_steps).div_ceil(page_size.max(1));
    let spare_pages = (repeats * STEPS).div_ceil(batch.max(1)) + few + 1;
    let num_pages = held_pages.saturating_add(spare_pages).saturating_mul(batch);
    let config = PlanConfig::new(batch, held_pages.saturating_add(spare_pages), num_pages, page_size, heads);
    let mut plan = DecodePlan::new(config)?;

    let pages: Vec<Vec<u32>> =
        (0..batch).map(|row| (0..held_pages).map(|page| (page * batch + row) as u32).collect()).collect();
    let mut slots = Vec::new();
    for pages in &pages {
        slots.push(plan.admit(pages, context, 0, None)?);
    }
    plan.ensure_work_list();

    // A step as the engine takes it; the median leaves out the few steps that divide the batch anew.
    let step = |plan: &mut DecodePlan| -> CoreResult<()> {
        plan.advance()?;
        plan.ensure_work_list();
        Ok(())
    };
    let advance = median(repeats, STEPS, |_| step(&mut plan))?;
    let crossing_one = median(repeats, STEPS, |call| {
        plan.append_page(slots[call % batch], (call % num_pages) as u32)?;
        step(&mut plan)
    })?;
    let crossing_all = median(few, 1, |call| {
        for &slot in &slots {
            plan.append_page(slot, (call % num_pages) as u32)?;
        }
        step(&mut plan)
    })?;

    let csr = compact(&pages, context, page_size);
    let rebuild = median(few, 1, |_| {
        black_box(plan.rebuild(csr.view(), None)?);
        Ok(())
    })?;
    Ok(vec![
        ("advance_ns", advance),
        ("crossing_one_ns", crossing_one),
        ("crossing_all_ns", crossing_all),
        ("rebuild_ns", rebuild),
    ])
}

/// Median over `samples` of the time per call of `step`, `calls` calls to a sample.
fn median(samples: usize, calls: usize, mut step: impl FnMut(usize) -> CoreResult<()>) -> CoreResult<f64> {
    let mut times = Vec::with_capacity(samples);
    for sample in 0..samples {
        let start = Instant::now();
        for call in 0..calls {
            step(sample * calls + call)?;
        }
        times.push(start.elapsed().as_nanos() as f64 / calls as f64);
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// The CSR arrays of rows of `context` tokens.
fn compact(pages: &[Vec<u32>], context: usize, page_size: usize) -> Csr {
    let used = context.div_ceil(page_size);
    let last_page_len = if context == 0 { 0 } else { (context - 1) % page_size + 1 };
    Csr {
        indptr: (0..=pages.len()).map(|row| (row * used) as i32).collect(),
        indices: pages.iter().flat_map(|pages| &pages[..used]).map(|&page| page as i32).collect(),
        last_page_len: vec![last_page_len as i32; pages.len()],
        first_page_offset: vec![0; pages.len()],
        ..Csr::default()
    }
}

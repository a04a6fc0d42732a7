//! Timings of projections of a few rows against the installed BLAS, taken in Rust so that no interpreter time is in them.

use std::hint::black_box;
use std::time::Instant;

use paged_core::attention::Executor;
use paged_core::{Error, MAX_PROJECTION_ROWS, Projection};
use pyo3::prelude::*;

use crate::blas::{forward_sgemm, is_installed, set_blas_threads};
use crate::buffer::count;
use crate::errors::CoreResult;
use crate::plan_config::Argument;
use crate::sgemm::{NO_TRANSPOSE, ROW_MAJOR, TRANSPOSE};

/// More weights than any cache holds; calls take turns on them.
const ROTATED_BYTES: usize = 256 << 20;
const MAX_SIZE: usize = 1 << 16;

/// See the stub.
#[pyfunction]
#[pyo3(signature = (num_rows, num_columns, depth, num_rounds))]
pub(crate) fn bench_projection(
    py: Python<'_>,
    num_rows: Argument<'_, '_>,
    num_columns: Argument<'_, '_>,
    depth: Argument<'_, '_>,
    num_rounds: Argument<'_, '_>,
) -> CoreResult<(f64, f64)> {
    if !is_installed() {
        return Err(Error::invalid(
            "num_rows",
            "no BLAS to compare with; call mlxcel_paged.blas.prepare() first",
        )
        .into());
    }
    let num_rows = count("num_rows", num_rows)?;
    let num_columns = count("num_columns", num_columns)?;
    let depth = count("depth", depth)?;
    let num_rounds = count("num_rounds", num_rounds)?;
    for (argument, value, max) in [
        ("num_rows", num_rows, MAX_PROJECTION_ROWS),
        ("num_columns", num_columns, MAX_SIZE),
        ("depth", depth, MAX_SIZE),
        ("num_rounds", num_rounds, MAX_SIZE),
    ] {
        if value == 0 || value > max {
            return Err(Error::invalid(argument, format!("{value}, expected 1 to {max}")).into());
        }
    }
    Ok(py.detach(|| {
        set_blas_threads(Executor::global().num_threads());
        let times = measure(num_rows, num_columns, depth, num_rounds);
        set_blas_threads(1);
        times
    }))
}

/// Median microseconds of both, taking turns.
fn measure(num_rows: usize, num_columns: usize, depth: usize, num_rounds: usize) -> (f64, f64) {
    let num_copies = (ROTATED_BYTES / (num_columns * depth * size_of::<f32>())).max(1);
    let value = |i: usize| (i % 17) as f32 / 17.0 - 0.5;
    let weights: Vec<f32> = (0..num_copies * num_columns * depth).map(value).collect();
    let a: Vec<f32> = (0..num_rows * depth).map(value).collect();
    let mut c = vec![0.0f32; num_rows * num_columns];
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..=num_rounds {
        let w = weights[(2 * round) % num_copies * num_columns * depth..].as_ptr();
        let start = Instant::now();
        let projection = Projection {
            num_rows,
            num_columns,
            depth,
            a: (a.as_ptr(), depth),
            w: (w, depth),
            c: (c.as_mut_ptr(), num_columns),
            alpha: 1.0,
            beta: 0.0,
        };
        // SAFETY: the vectors hold matrices of these sizes.
        unsafe { projection.run(Executor::global()) };
        let middle = Instant::now();
        let w = weights[(2 * round + 1) % num_copies * num_columns * depth..].as_ptr();
        let [m, n, k] = [num_rows, num_columns, depth].map(|size| size as i32);
        // SAFETY: as above.
        unsafe {
            forward_sgemm(
                ROW_MAJOR,
                NO_TRANSPOSE,
                TRANSPOSE,
                m,
                n,
                k,
                1.0,
                a.as_ptr(),
                k,
                w,
                k,
                0.0,
                c.as_mut_ptr(),
                n,
            )
        };
        let end = Instant::now();
        black_box(&c);
        if round > 0 {
            ours.push((middle - start).as_secs_f64() * 1e6);
            theirs.push((end - middle).as_secs_f64() * 1e6);
        }
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    (median(ours), median(theirs))
}

//! Projections of a few rows: `C = A W^T` with a row of A per sequence of a decode batch.
//!
//! Such a product reads each weight once and does little with it, so it is bound by memory, and a general matrix product, which
//! first copies the weights into packed blocks, moves several times the bytes. Here weight rows are streamed: `LANES / 4` of them
//! at a time against up to four rows of A, one accumulator each, summed across lanes at the end.
//!
//! An element of C is summed in the same order whatever the number of rows, its place among them, and the number of threads: a
//! sequence gets the same bits in any batch of up to [`MAX_PROJECTION_ROWS`].

use crate::attention::Executor;
use crate::attention::simd::{Kernel, MAX_LANES, Simd, dispatch};

/// Rows of A that are served. Streaming beats a packed product up to about 8; from there to here it loses a little for the same bits in
/// any batch (ADR 0006).
pub const MAX_PROJECTION_ROWS: usize = 16;

/// Rows of A that share a pass over a tile of weights.
const ROWS_PER_PASS: usize = 4;

/// Weight bytes of one task: long enough to hide the hand-over, short enough to balance the threads.
const TASK_BYTES: usize = 64 * 1024;

/// Tiles of weights up to this size are asked for while the tile before them is in use, longer ones a little ahead in their rows:
/// rows of a few kilobytes end before the processor's own prefetcher has caught on.
const MAX_AHEAD_BYTES: usize = 16 * 1024;
const AHEAD_IN_ROW: usize = 512;

/// One product, by pointers: A is `[num_rows, depth]`, W `[num_columns, depth]`, C `[num_rows, num_columns]`, all row-major f32.
#[derive(Debug, Clone, Copy)]
pub struct Projection {
    /// Rows of A and C, at most [`MAX_PROJECTION_ROWS`].
    pub num_rows: usize,
    /// Rows of W, columns of C.
    pub num_columns: usize,
    /// Columns of A and W.
    pub depth: usize,
    /// A, and the elements from one of its rows to the next.
    pub a: (*const f32, usize),
    /// W, and the elements from one of its rows to the next.
    pub w: (*const f32, usize),
    /// C, and the elements from one of its rows to the next.
    pub c: (*mut f32, usize),
    /// `C = alpha A W^T + beta C`; C is not read if beta is 0.
    pub alpha: f32,
    /// See `alpha`.
    pub beta: f32,
}

// SAFETY: the pointers are used only inside `run`, whose caller promises that they may be, and whose tasks write disjoint columns.
unsafe impl Sync for Projection {}

impl Projection {
    /// Computes the product on the threads of `executor`.
    ///
    /// # Panics
    /// If `num_rows` is above [`MAX_PROJECTION_ROWS`].
    ///
    /// # Safety
    /// The matrices are readable and C is writable as described; C overlaps neither A nor W, and nobody else touches it.
    pub unsafe fn run(&self, executor: &Executor) {
        assert!(self.num_rows <= MAX_PROJECTION_ROWS, "{} rows", self.num_rows);
        let row_bytes = self.depth.max(1) * size_of::<f32>();
        let columns_per_task = (TASK_BYTES / row_bytes).next_multiple_of(MAX_LANES).max(MAX_LANES);
        let num_tasks = self.num_columns.div_ceil(columns_per_task);
        executor.run(num_tasks, self.num_columns * row_bytes, |task| {
            let begin = task * columns_per_task;
            let end = (begin + columns_per_task).min(self.num_columns);
            dispatch(executor.simd(), Columns { projection: self, begin, end });
        });
    }
}

/// The columns `begin..end` of C.
struct Columns<'a> {
    projection: &'a Projection,
    begin: usize,
    end: usize,
}

impl Kernel for Columns<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let tile = S::LANES / ROWS_PER_PASS;
        let mut column = self.begin;
        while column < self.end {
            let num_columns = tile.min(self.end - column);
            let mut row = 0;
            while row < self.projection.num_rows {
                let num_rows = ROWS_PER_PASS.min(self.projection.num_rows - row);
                // SAFETY: rows and columns are inside the matrices, as the caller of `Projection::run` promised.
                unsafe {
                    match num_rows {
                        1 => pass::<S, 1>(s, self.projection, row, column, num_columns),
                        2 => pass::<S, 2>(s, self.projection, row, column, num_columns),
                        3 => pass::<S, 3>(s, self.projection, row, column, num_columns),
                        _ => pass::<S, 4>(s, self.projection, row, column, num_columns),
                    }
                }
                row += num_rows;
            }
            column += num_columns;
        }
    }
}

/// `R` rows of A against `num_columns` rows of W, at most `LANES / 4`.
///
/// # Safety
/// They exist.
#[inline(always)]
unsafe fn pass<S: Simd, const R: usize>(s: S, p: &Projection, row: usize, column: usize, num_columns: usize) {
    let (columns_per_tile, depth) = (S::LANES / ROWS_PER_PASS, p.depth);
    // A tile that W does not fill reads its last row again; the surplus sums are not stored.
    let weights: [*const f32; MAX_LANES / ROWS_PER_PASS] = core::array::from_fn(|j| {
        // SAFETY: the row exists.
        unsafe { p.w.0.add((column + j.min(num_columns - 1)) * p.w.1) }
    });
    // SAFETY: the row exists.
    let rows: [*const f32; R] = core::array::from_fn(|r| unsafe { p.a.0.add((row + r) * p.a.1) });
    let mut sums = [s.splat(0.0); MAX_LANES];
    let whole = depth - depth % S::LANES;
    let mut k = 0;
    let tile = columns_per_tile * p.w.1;
    let ahead = if tile * size_of::<f32>() <= MAX_AHEAD_BYTES { tile } else { AHEAD_IN_ROW };
    while k < whole {
        if row == 0 {
            for weights in &weights[..columns_per_tile] {
                s.prefetch(weights.wrapping_add(k + ahead).cast());
            }
        }
        // SAFETY: k + LANES <= depth.
        unsafe {
            multiply::<S, R>(
                s,
                &mut sums,
                rows.map(|a| a.add(k)),
                weights.map(|w| w.add(k)),
                columns_per_tile,
            )
        };
        k += S::LANES;
    }
    if whole < depth {
        let tail = |from: *const f32| {
            let mut padded = [0.0f32; MAX_LANES];
            // SAFETY: depth - whole < LANES elements are left in the row.
            unsafe { core::ptr::copy_nonoverlapping(from.add(whole), padded.as_mut_ptr(), depth - whole) };
            padded
        };
        let (a_tails, w_tails) = (rows.map(tail), weights.map(tail));
        let (a, w) = (a_tails.each_ref().map(|t| t.as_ptr()), w_tails.each_ref().map(|t| t.as_ptr()));
        // SAFETY: the padded tails hold LANES elements.
        unsafe { multiply::<S, R>(s, &mut sums, a, w, columns_per_tile) };
    }
    let mut totals = [0.0f32; MAX_LANES];
    // SAFETY: `totals` holds LANES elements; the row and column of C exist.
    unsafe {
        s.store_f32(totals.as_mut_ptr(), s.sum_rows(&sums));
        for r in 0..R {
            for j in 0..num_columns {
                let c = p.c.0.add((row + r) * p.c.1 + column + j);
                let product = p.alpha * totals[j * ROWS_PER_PASS + r];
                *c = if p.beta == 0.0 { product } else { product + p.beta * *c };
            }
        }
    }
}

/// Adds one vector of the depth to every accumulator: sum `4 j + r` is of weight row j and row r of A.
///
/// # Safety
/// `LANES` elements are readable at every pointer of the first `columns_per_tile` weights and of `a`.
#[inline(always)]
unsafe fn multiply<S: Simd, const R: usize>(
    s: S,
    sums: &mut [S::V; MAX_LANES],
    a: [*const f32; R],
    w: [*const f32; MAX_LANES / ROWS_PER_PASS],
    columns_per_tile: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut a_vectors = [s.splat(0.0); R];
        for r in 0..R {
            a_vectors[r] = s.load_f32(a[r]);
        }
        for j in 0..columns_per_tile {
            let w_vector = s.load_f32(w[j]);
            for r in 0..R {
                sums[j * ROWS_PER_PASS + r] = s.fma(a_vectors[r], w_vector, sums[j * ROWS_PER_PASS + r]);
            }
        }
    }
}

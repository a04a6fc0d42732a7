//! The `cblas_sgemm` that MLX calls: projections of a few rows run here, everything else on the installed BLAS.
//!
//! OpenBLAS's own threads wait for each other by spinning: where something else uses a core, a product takes a hundred times as
//! long. So it runs on one thread per call, and large products are cut into slices that our threads, which sleep, take in turns.

use std::ffi::c_int;

use paged_core::attention::Executor;
use paged_core::{MAX_PROJECTION_ROWS, Projection};

use crate::blas::{count_call, forward_sgemm};

pub(crate) const ROW_MAJOR: c_int = 101;
pub(crate) const NO_TRANSPOSE: c_int = 111;
pub(crate) const TRANSPOSE: c_int = 112;

/// Slices are multiples of this many rows or columns, which OpenBLAS's micro-kernels divide.
const SLICE_MULTIPLE: usize = 64;

/// Slices per thread: enough that a thread which lost its core for a moment does not hold up the others for long.
const SLICES_PER_THREAD: usize = 4;

/// Multiplications of a slice at least: fewer are not worth packing the shared operand again.
const MIN_SLICE_PRODUCTS: usize = 1 << 22;

/// `C = alpha A op(B) + beta C`, CBLAS.
///
/// # Safety
/// That of the CBLAS function of this name.
// SAFETY: the name is exported for libraries that look for a CBLAS, and has its signature and meaning.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn cblas_sgemm(
    order: c_int,
    trans_a: c_int,
    trans_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: f32,
    a: *const f32,
    lda: c_int,
    b: *const f32,
    ldb: c_int,
    beta: f32,
    c: *mut f32,
    ldc: c_int,
) {
    let is_projection = (order, trans_a, trans_b) == (ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE)
        && (1..=MAX_PROJECTION_ROWS as c_int).contains(&m)
        && n > 0
        && k > 0
        && lda >= k
        && ldb >= k
        && ldc >= n;
    if !is_projection {
        let product = Product { order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc };
        // SAFETY: the caller's promise.
        unsafe { product.run(Executor::global()) };
        return;
    }
    count_call();
    let projection = Projection {
        num_rows: m as usize,
        num_columns: n as usize,
        depth: k as usize,
        a: (a, lda as usize),
        w: (b, ldb as usize),
        c: (c, ldc as usize),
        alpha,
        beta,
    };
    // SAFETY: CBLAS's caller promises matrices of these sizes, and that C is its own.
    unsafe { projection.run(Executor::global()) };
}

/// The arguments of one CBLAS call.
#[derive(Clone, Copy)]
struct Product {
    order: c_int,
    trans_a: c_int,
    trans_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: f32,
    a: *const f32,
    lda: c_int,
    b: *const f32,
    ldb: c_int,
    beta: f32,
    c: *mut f32,
    ldc: c_int,
}

// SAFETY: the pointers are used only inside `run`, whose caller promises that they may be, and whose slices write disjoint parts of C.
unsafe impl Sync for Product {}

impl Product {
    /// # Safety
    /// That of `cblas_sgemm`.
    unsafe fn run(&self, executor: &Executor) {
        let Some((length, num_slices)) = self.slices(executor.num_threads()) else {
            // SAFETY: the caller's promise.
            unsafe { self.forward() };
            return;
        };
        executor.run(num_slices, usize::MAX, |index| {
            let begin = index * length;
            // SAFETY: the slice is inside the matrices, and no other has its part of C.
            unsafe { self.slice(begin, length).forward() };
        });
    }

    /// Rows or columns in a slice, whichever are more, and the number of slices; None for a product that stays whole.
    fn slices(&self, num_threads: usize) -> Option<(usize, usize)> {
        let known = |trans| trans == NO_TRANSPOSE || trans == TRANSPOSE;
        if self.order != ROW_MAJOR || !known(self.trans_a) || !known(self.trans_b) || num_threads == 1 {
            return None;
        }
        let [m, n, k] =
            [self.m, self.n, self.k].map(|size| usize::try_from(size).ok().filter(|&size| size > 0));
        let (m, n, k) = (m?, n?, k?);
        let (long, short) = (m.max(n), m.min(n));
        let products = long.saturating_mul(short).saturating_mul(k);
        let num_slices = (products / MIN_SLICE_PRODUCTS).min(num_threads * SLICES_PER_THREAD);
        if num_slices < 2 {
            return None;
        }
        let length = long.div_ceil(num_slices).next_multiple_of(SLICE_MULTIPLE);
        (length < long).then(|| (length, long.div_ceil(length)))
    }

    /// The part of `length` rows or columns of C, whichever are more, from `begin` on.
    ///
    /// # Safety
    /// `begin` is below their number.
    unsafe fn slice(&self, begin: usize, length: usize) -> Self {
        let mut slice = *self;
        // SAFETY: the offsets stay inside the matrices.
        unsafe {
            if self.m > self.n {
                let step = if self.trans_a == NO_TRANSPOSE { self.lda as usize } else { 1 };
                slice.a = self.a.add(begin * step);
                slice.c = self.c.add(begin * self.ldc as usize);
                slice.m = length.min(self.m as usize - begin) as c_int;
            } else {
                let step = if self.trans_b == NO_TRANSPOSE { 1 } else { self.ldb as usize };
                slice.b = self.b.add(begin * step);
                slice.c = self.c.add(begin);
                slice.n = length.min(self.n as usize - begin) as c_int;
            }
        }
        slice
    }

    /// # Safety
    /// That of `cblas_sgemm`.
    unsafe fn forward(&self) {
        let Self { order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc } = *self;
        // SAFETY: the caller's promise.
        unsafe { forward_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc) };
    }
}

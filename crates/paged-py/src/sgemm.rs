//! The `cblas_sgemm` that MLX calls: projections of a few rows run here, everything else on the installed BLAS.

use std::ffi::c_int;

use paged_core::attention::Executor;
use paged_core::{MAX_PROJECTION_ROWS, Projection};

use crate::blas::{count_call, forward_sgemm};

const ROW_MAJOR: c_int = 101;
const NO_TRANSPOSE: c_int = 111;
const TRANSPOSE: c_int = 112;

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
        // SAFETY: the caller's promise.
        unsafe { forward_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc) };
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

//! The matrix product of both halves of attention, blocked for registers.

use crate::attention::simd::Simd;

/// Rows of the micro-kernel: with the columns of `Simd::GEMM_VECTORS` they fill the registers with accumulators.
pub(crate) const MICRO_ROWS: usize = 6;

/// A row-major f32 matrix.
#[derive(Clone, Copy)]
pub(crate) struct Matrix {
    pub data: *mut f32,
    pub stride: usize,
}

/// `C = A B`, or `C = diag(decay) C + A B`.
///
/// # Safety
/// A is `[num_rows, depth]`, B `[depth, num_columns]`, C `[num_rows, num_columns]` and `decay`, if given, `[num_rows]`;
/// `num_rows` is a multiple of [`MICRO_ROWS`] and `num_columns` of the lanes.
#[inline(always)]
pub(crate) unsafe fn gemm<S: Simd>(
    s: S,
    (num_rows, num_columns, depth): (usize, usize, usize),
    a: Matrix,
    b: Matrix,
    c: Matrix,
    decay: Option<*const f32>,
) {
    let mut column = 0;
    while column < num_columns {
        let num_vectors = ((num_columns - column) / S::LANES).min(S::GEMM_VECTORS);
        let mut row = 0;
        while row < num_rows {
            // SAFETY: the block is inside the matrices.
            unsafe {
                let a = Matrix { data: a.data.add(row * a.stride), ..a };
                let b = Matrix { data: b.data.add(column), ..b };
                let c = Matrix { data: c.data.add(row * c.stride + column), ..c };
                let decay = decay.map(|decay| decay.add(row));
                match num_vectors {
                    4 => micro::<S, 4>(s, depth, a, b, c, decay),
                    3 => micro::<S, 3>(s, depth, a, b, c, decay),
                    2 => micro::<S, 2>(s, depth, a, b, c, decay),
                    _ => micro::<S, 1>(s, depth, a, b, c, decay),
                }
            }
            row += MICRO_ROWS;
        }
        column += num_vectors * S::LANES;
    }
}

/// `MICRO_ROWS` rows by `N` vectors of columns, all in registers.
///
/// # Safety
/// As [`gemm`], for a block of this size.
#[inline(always)]
unsafe fn micro<S: Simd, const N: usize>(
    s: S,
    depth: usize,
    a: Matrix,
    b: Matrix,
    c: Matrix,
    decay: Option<*const f32>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[s.splat(0.0); N]; MICRO_ROWS];
        if let Some(decay) = decay {
            for r in 0..MICRO_ROWS {
                let decay = s.splat(*decay.add(r));
                for n in 0..N {
                    sums[r][n] = s.mul(decay, s.load_f32(c.data.add(r * c.stride + n * S::LANES)));
                }
            }
        }
        for k in 0..depth {
            let row = b.data.add(k * b.stride);
            let mut columns = [s.splat(0.0); N];
            for n in 0..N {
                columns[n] = s.load_f32(row.add(n * S::LANES));
            }
            for r in 0..MICRO_ROWS {
                let x = s.splat(*a.data.add(r * a.stride + k));
                for n in 0..N {
                    sums[r][n] = s.fma(x, columns[n], sums[r][n]);
                }
            }
        }
        for r in 0..MICRO_ROWS {
            for n in 0..N {
                s.store_f32(c.data.add(r * c.stride + n * S::LANES), sums[r][n]);
            }
        }
    }
}

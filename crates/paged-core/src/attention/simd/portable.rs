//! Plain Rust: 8 lanes that the compiler maps to whatever the target has.

use half::{bf16, f16};

use super::{MAX_LANES, Simd};

const LANES: usize = 8;

/// Needs no proof: the instructions are the target's baseline.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

type Lanes = [f32; LANES];

#[inline(always)]
fn map2(a: Lanes, b: Lanes, f: impl Fn(f32, f32) -> f32) -> Lanes {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

impl Simd for Portable {
    type V = Lanes;
    const LANES: usize = LANES;
    const GEMM_VECTORS: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> Lanes {
        [x; LANES]
    }

    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        map2(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        map2(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        map2(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Lanes, b: Lanes) -> Lanes {
        map2(a, b, |a, b| a / b)
    }

    // Two roundings: `f32::mul_add` is a library call where the baseline has no fused instruction.
    #[inline(always)]
    fn fma(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        let mut out = c;
        for i in 0..LANES {
            out[i] += a[i] * b[i];
        }
        out
    }

    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        map2(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn select_lt(self, x: Lanes, y: Lanes, a: Lanes, b: Lanes) -> Lanes {
        let mut out = b;
        for i in 0..LANES {
            if x[i] < y[i] {
                out[i] = a[i];
            }
        }
        out
    }

    #[inline(always)]
    fn round(self, x: Lanes) -> Lanes {
        // Adding 1.5 * 2^23 leaves no fraction bits: exact for the |x| < 2^22 that exponents have.
        const SHIFT: f32 = 12_582_912.0;
        x.map(|x| (x + SHIFT) - SHIFT)
    }

    #[inline(always)]
    fn scale_by_power(self, x: Lanes, n: Lanes) -> Lanes {
        map2(x, n, |x, n| x * f32::from_bits(((n as i32 + 127) << 23) as u32))
    }

    #[inline(always)]
    fn swap(self, x: Lanes, distance: usize) -> Lanes {
        let mut out = x;
        for i in 0..LANES {
            out[i] = x[i ^ (distance & (LANES - 1))];
        }
        out
    }

    #[inline(always)]
    fn sum_rows(self, rows: &[Lanes; MAX_LANES]) -> Lanes {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            let r = rows[i];
            out[i] = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
        }
        out
    }

    #[inline(always)]
    fn transpose(self, rows: &mut [Lanes; MAX_LANES]) {
        let from = *rows;
        for i in 0..LANES {
            for j in 0..LANES {
                rows[i][j] = from[j][i];
            }
        }
    }

    #[inline(always)]
    unsafe fn load_f32(self, p: *const f32) -> Lanes {
        // SAFETY: the caller's promise; arrays of f32 have no padding.
        unsafe { p.cast::<Lanes>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Lanes {
        // SAFETY: the caller's promise.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| f16::from_bits(bits).to_f32())
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Lanes {
        // SAFETY: the caller's promise.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    unsafe fn store_f32(self, p: *mut f32, x: Lanes) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<Lanes>().write_unaligned(x) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: Lanes) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(x.map(|x| f16::from_f32(x).to_bits())) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, x: Lanes) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(x.map(|x| bf16::from_f32(x).to_bits())) }
    }
}

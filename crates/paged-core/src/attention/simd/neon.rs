//! Arm NEON: 8 lanes in two registers, which gives the block sizes of AVX2.

use core::arch::aarch64::*;
use core::arch::asm;

use super::{Kernel, MAX_LANES, Simd};

/// Proof that NEON is there.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

/// Lanes 0..4 and 4..8.
#[derive(Clone, Copy)]
pub(crate) struct Pair(float32x4_t, float32x4_t);

/// # Safety
/// The processor has NEON.
#[target_feature(enable = "neon")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon(()))
}

macro_rules! operations {
    ($(fn $name:ident($($arg:ident),*) = $intrinsic:ident($($given:ident),*);)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: Pair),*) -> Pair {
            // SAFETY: the token proves that the processor has the instructions.
            unsafe { Pair($intrinsic($($given.0),*), $intrinsic($($given.1),*)) }
        }
    )*};
}

/// 4 half precision values to f32. The conversion is base Armv8; the vector type for it is not stable in Rust.
///
/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn widen(bits: uint16x4_t) -> float32x4_t {
    let out: float32x4_t;
    // SAFETY: register to register.
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) out, in(vreg) bits, options(pure, nomem, nostack, preserves_flags));
    }
    out
}

/// 4 f32 values to half precision, nearest even.
///
/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn narrow(x: float32x4_t) -> uint16x4_t {
    let out: uint16x4_t;
    // SAFETY: register to register.
    unsafe {
        asm!("fcvtn {0:v}.4h, {1:v}.4s", out(vreg) out, in(vreg) x, options(pure, nomem, nostack, preserves_flags));
    }
    out
}

/// 4 f32 values to bfloat16, nearest even, NaN kept.
///
/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn narrow_bf16(x: float32x4_t) -> uint16x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = vreinterpretq_u32_f32(x);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        let quiet = vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc0_0000));
        vshrn_n_u32::<16>(quiet)
    }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn transpose_4x4(r: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let (ab_lo, ab_hi) = (vzip1q_f32(r[0], r[1]), vzip2q_f32(r[0], r[1]));
        let (cd_lo, cd_hi) = (vzip1q_f32(r[2], r[3]), vzip2q_f32(r[2], r[3]));
        let low =
            |a, b| vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
        let high =
            |a, b| vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
        [low(ab_lo, cd_lo), high(ab_lo, cd_lo), low(ab_hi, cd_hi), high(ab_hi, cd_hi)]
    }
}

impl Simd for Neon {
    type V = Pair;
    const LANES: usize = 8;
    const GEMM_VECTORS: usize = 2;

    operations! {
        fn add(a, b) = vaddq_f32(a, b);
        fn sub(a, b) = vsubq_f32(a, b);
        fn mul(a, b) = vmulq_f32(a, b);
        fn div(a, b) = vdivq_f32(a, b);
        fn fma(a, b, c) = vfmaq_f32(c, a, b);
        fn round(x) = vrndnq_f32(x);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Pair {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe { Pair(vdupq_n_f32(x), vdupq_n_f32(x)) }
    }

    #[inline(always)]
    fn max(self, a: Pair, b: Pair) -> Pair {
        self.select_lt(b, a, a, b)
    }

    #[inline(always)]
    fn select_lt(self, x: Pair, y: Pair, a: Pair, b: Pair) -> Pair {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe { Pair(vbslq_f32(vcltq_f32(x.0, y.0), a.0, b.0), vbslq_f32(vcltq_f32(x.1, y.1), a.1, b.1)) }
    }

    #[inline(always)]
    fn scale_by_power(self, x: Pair, n: Pair) -> Pair {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe {
            let power =
                |n| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127))));
            Pair(vmulq_f32(x.0, power(n.0)), vmulq_f32(x.1, power(n.1)))
        }
    }

    #[inline(always)]
    fn swap(self, x: Pair, distance: usize) -> Pair {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe {
            match distance {
                1 => Pair(vrev64q_f32(x.0), vrev64q_f32(x.1)),
                2 => Pair(vextq_f32::<2>(x.0, x.0), vextq_f32::<2>(x.1, x.1)),
                _ => Pair(x.1, x.0),
            }
        }
    }

    #[inline(always)]
    fn sum_rows(self, rows: &[Pair; MAX_LANES]) -> Pair {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe {
            let fold = |i: usize| vaddq_f32(rows[i].0, rows[i].1);
            let quad =
                |i: usize| vpaddq_f32(vpaddq_f32(fold(i), fold(i + 1)), vpaddq_f32(fold(i + 2), fold(i + 3)));
            Pair(quad(0), quad(4))
        }
    }

    #[inline(always)]
    fn transpose(self, rows: &mut [Pair; MAX_LANES]) {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe {
            let upper_left = transpose_4x4([rows[0].0, rows[1].0, rows[2].0, rows[3].0]);
            let upper_right = transpose_4x4([rows[0].1, rows[1].1, rows[2].1, rows[3].1]);
            let lower_left = transpose_4x4([rows[4].0, rows[5].0, rows[6].0, rows[7].0]);
            let lower_right = transpose_4x4([rows[4].1, rows[5].1, rows[6].1, rows[7].1]);
            for i in 0..4 {
                rows[i] = Pair(upper_left[i], lower_left[i]);
                rows[4 + i] = Pair(upper_right[i], lower_right[i]);
            }
        }
    }

    #[inline(always)]
    unsafe fn load_f32(self, p: *const f32) -> Pair {
        // SAFETY: the caller's promise.
        unsafe { Pair(vld1q_f32(p), vld1q_f32(p.add(4))) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Pair {
        // SAFETY: the caller's promise.
        unsafe { Pair(widen(vld1_u16(p)), widen(vld1_u16(p.add(4)))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Pair {
        // SAFETY: the caller's promise.
        unsafe {
            let widen = |bits| vreinterpretq_f32_u32(vshll_n_u16::<16>(bits));
            Pair(widen(vld1_u16(p)), widen(vld1_u16(p.add(4))))
        }
    }

    #[inline(always)]
    unsafe fn store_f32(self, p: *mut f32, x: Pair) {
        // SAFETY: the caller's promise.
        unsafe {
            vst1q_f32(p, x.0);
            vst1q_f32(p.add(4), x.1);
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: Pair) {
        // SAFETY: the caller's promise.
        unsafe {
            vst1_u16(p, narrow(x.0));
            vst1_u16(p.add(4), narrow(x.1));
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, x: Pair) {
        // SAFETY: the caller's promise.
        unsafe {
            vst1_u16(p, narrow_bf16(x.0));
            vst1_u16(p.add(4), narrow_bf16(x.1));
        }
    }
}

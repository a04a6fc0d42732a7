//! AVX-512: 16 lanes.

use core::arch::x86_64::*;

use super::{Kernel, MAX_LANES, Simd};

/// Proof that AVX-512 F, BW, DQ, VL, AVX2, FMA and F16C are there.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// # Safety
/// The processor has the features named.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

macro_rules! operations {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $type),*) -> $result {
            // SAFETY: the token proves that the processor has the instructions.
            unsafe { $body }
        }
    )*};
}

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const GEMM_VECTORS: usize = 4;

    operations! {
        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        fn round(x: __m512) -> __m512 = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
        fn select_lt(x: __m512, y: __m512, a: __m512, b: __m512) -> __m512 =
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, y), b, a);
    }

    #[inline(always)]
    fn scale_by_power(self, x: __m512, n: __m512) -> __m512 {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe {
            let keep = _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(n, _mm512_set1_ps(-127.0));
            _mm512_maskz_scalef_ps(keep, x, n)
        }
    }

    #[inline(always)]
    fn swap(self, x: __m512, distance: usize) -> __m512 {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe {
            match distance {
                1 => _mm512_permute_ps::<0b10_11_00_01>(x),
                2 => _mm512_permute_ps::<0b01_00_11_10>(x),
                4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x),
                _ => _mm512_shuffle_f32x4::<0b01_00_11_10>(x, x),
            }
        }
    }

    #[inline(always)]
    fn sum_rows(self, rows: &[__m512; MAX_LANES]) -> __m512 {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe {
            // quads[i], 128-bit part k: what remains to be added over k of rows 4i..4i + 4.
            let mut quads = [_mm512_setzero_ps(); 4];
            for i in 0..4 {
                let (a, b, c, d) = (rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]);
                let ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
                let cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
                quads[i] = _mm512_add_ps(
                    _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
                );
            }
            let fold = |a: __m512, b: __m512| {
                _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
            };
            fold(fold(quads[0], quads[1]), fold(quads[2], quads[3]))
        }
    }

    #[inline(always)]
    fn transpose(self, rows: &mut [__m512; MAX_LANES]) {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe {
            // 4 x 4 blocks inside the 128-bit parts first, then the parts among themselves.
            for i in 0..4 {
                let (a, b, c, d) = (rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]);
                let ab_lo = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
                let ab_hi = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
                let cd_lo = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
                let cd_hi = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
                rows[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_lo, cd_lo));
                rows[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_lo, cd_lo));
                rows[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_hi, cd_hi));
                rows[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_hi, cd_hi));
            }
            for j in 0..4 {
                let (a, b, c, d) = (rows[j], rows[4 + j], rows[8 + j], rows[12 + j]);
                let ab_even = _mm512_shuffle_f32x4::<0x88>(a, b);
                let ab_odd = _mm512_shuffle_f32x4::<0xdd>(a, b);
                let cd_even = _mm512_shuffle_f32x4::<0x88>(c, d);
                let cd_odd = _mm512_shuffle_f32x4::<0xdd>(c, d);
                rows[j] = _mm512_shuffle_f32x4::<0x88>(ab_even, cd_even);
                rows[4 + j] = _mm512_shuffle_f32x4::<0x88>(ab_odd, cd_odd);
                rows[8 + j] = _mm512_shuffle_f32x4::<0xdd>(ab_even, cd_even);
                rows[12 + j] = _mm512_shuffle_f32x4::<0xdd>(ab_odd, cd_odd);
            }
        }
    }

    #[inline(always)]
    unsafe fn load_f32(self, p: *const f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))))
        }
    }

    #[inline(always)]
    unsafe fn store_f32(self, p: *mut f32, x: __m512) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(p, x) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: __m512) {
        // SAFETY: the caller's promise.
        unsafe {
            let half = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            _mm256_storeu_si256(p.cast(), half);
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, x: __m512) {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let quiet = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc0_0000));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(quiet)));
        }
    }
}

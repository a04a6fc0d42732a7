//! AVX2 with FMA and F16C: 8 lanes.

use core::arch::x86_64::*;

use super::{Kernel, MAX_LANES, Simd};

/// Proof that AVX2, FMA and F16C are there.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

/// # Safety
/// The processor has the features named.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
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

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const GEMM_VECTORS: usize = 2;

    operations! {
        fn splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        fn add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        fn sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        fn mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        fn div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        fn max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        fn round(x: __m256) -> __m256 = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
        fn select_lt(x: __m256, y: __m256, a: __m256, b: __m256) -> __m256 =
            _mm256_blendv_ps(b, a, _mm256_cmp_ps::<_CMP_LT_OQ>(x, y));
    }

    #[inline(always)]
    fn scale_by_power(self, x: __m256, n: __m256) -> __m256 {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
        }
    }

    #[inline(always)]
    fn swap(self, x: __m256, distance: usize) -> __m256 {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe {
            match distance {
                1 => _mm256_permute_ps::<0b10_11_00_01>(x),
                2 => _mm256_permute_ps::<0b01_00_11_10>(x),
                _ => _mm256_permute2f128_ps::<1>(x, x),
            }
        }
    }

    #[inline(always)]
    fn sum_rows(self, rows: &[__m256; MAX_LANES]) -> __m256 {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe {
            let mut quads = [_mm256_setzero_ps(); 2];
            for i in 0..2 {
                let (a, b, c, d) = (rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]);
                let ab = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
                let cd = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
                quads[i] = _mm256_add_ps(
                    _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)),
                    _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)),
                );
            }
            _mm256_add_ps(
                _mm256_permute2f128_ps::<0x20>(quads[0], quads[1]),
                _mm256_permute2f128_ps::<0x31>(quads[0], quads[1]),
            )
        }
    }

    #[inline(always)]
    fn transpose(self, rows: &mut [__m256; MAX_LANES]) {
        // SAFETY: the token proves that the processor has the instructions.
        unsafe {
            for i in 0..2 {
                let (a, b, c, d) = (rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]);
                let ab_lo = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
                let ab_hi = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
                let cd_lo = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
                let cd_hi = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
                rows[4 * i] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab_lo, cd_lo));
                rows[4 * i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab_lo, cd_lo));
                rows[4 * i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab_hi, cd_hi));
                rows[4 * i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab_hi, cd_hi));
            }
            for j in 0..4 {
                let (a, b) = (rows[j], rows[4 + j]);
                rows[j] = _mm256_permute2f128_ps::<0x20>(a, b);
                rows[4 + j] = _mm256_permute2f128_ps::<0x31>(a, b);
            }
        }
    }

    #[inline(always)]
    unsafe fn load_f32(self, p: *const f32) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))
        }
    }

    #[inline(always)]
    unsafe fn store_f32(self, p: *mut f32, x: __m256) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(p, x) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, x: __m256) {
        // SAFETY: the caller's promise.
        unsafe {
            let half = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            _mm_storeu_si128(p.cast(), half);
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, x: __m256) {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            let quiet = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0_0000), nan);
            let high = _mm256_srli_epi32::<16>(quiet);
            let packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256::<1>(high));
            _mm_storeu_si128(p.cast(), packed);
        }
    }
}

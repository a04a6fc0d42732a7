//! One vector type per instruction set, chosen once at run time.
//!
//! Kernels are written once, generic over [`Simd`], with every function on the way `#[inline(always)]`; [`dispatch`]
//! enters them through a function compiled for the chosen instruction set, so that the whole kernel is too. A value of
//! a `Simd` type is the proof that the processor has the instructions.

mod level;
mod portable;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

pub use level::SimdLevel;

/// Most lanes that any backend has; sizes the arrays of vectors that stand for a square block.
pub(crate) const MAX_LANES: usize = 16;

/// Arithmetic on vectors of `LANES` f32 values.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// The vector.
    type V: Copy;
    /// f32 values in a vector.
    const LANES: usize;
    /// Vectors of columns that the matrix micro-kernel keeps in registers for each of its rows.
    const GEMM_VECTORS: usize;

    fn splat(self, x: f32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a` where `x < y`, else (NaN included) `b`.
    fn select_lt(self, x: Self::V, y: Self::V, a: Self::V, b: Self::V) -> Self::V;
    /// Nearest integer.
    fn round(self, x: Self::V) -> Self::V;
    /// `x * 2^n` for an integral `n` in -127..=127; 0 for n = -127.
    fn scale_by_power(self, x: Self::V, n: Self::V) -> Self::V;
    /// Lane `i` gets lane `i ^ distance`; `distance` is a power of two below `LANES`.
    fn swap(self, x: Self::V, distance: usize) -> Self::V;
    /// Lane `i` of the result is the sum of the lanes of `rows[i]`, for `i < LANES`.
    fn sum_rows(self, rows: &[Self::V; MAX_LANES]) -> Self::V;
    /// Transposes the square block held in the first `LANES` vectors.
    fn transpose(self, rows: &mut [Self::V; MAX_LANES]);

    /// # Safety
    /// `LANES` values are readable at `p`, which may be unaligned (so for all loads and stores).
    unsafe fn load_f32(self, p: *const f32) -> Self::V;
    /// # Safety
    /// As `load_f32`; the values are IEEE half precision.
    unsafe fn load_f16(self, p: *const u16) -> Self::V;
    /// # Safety
    /// As `load_f32`; the values are bfloat16.
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;
    /// # Safety
    /// `LANES` values are writable at `p`.
    unsafe fn store_f32(self, p: *mut f32, x: Self::V);
    /// # Safety
    /// As `store_f32`; rounds to the nearest half precision value, ties to even.
    unsafe fn store_f16(self, p: *mut u16, x: Self::V);
    /// # Safety
    /// As `store_f32`; rounds to the nearest bfloat16 value, ties to even.
    unsafe fn store_bf16(self, p: *mut u16, x: Self::V);

    /// Asks for the cache line of `p`, which may be any address, for use in a moment and then no more: K and V rows that
    /// pushed each other into the outer caches on their way out would cost a fifth of the memory bandwidth.
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch is a hint and never faults.
        unsafe {
            core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_NTA }>(p.cast())
        };
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a prefetch is a hint and never faults.
        unsafe {
            core::arch::asm!("prfm pldl1strm, [{0}]", in(reg) p, options(nostack, readonly, preserves_flags))
        };
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = p;
    }

    /// As `prefetch`, but the line goes to the outer caches when it leaves the first.
    #[inline(always)]
    fn prefetch_kept(self, p: *const u8) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch is a hint and never faults.
        unsafe {
            core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(p.cast())
        };
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a prefetch is a hint and never faults.
        unsafe {
            core::arch::asm!("prfm pldl1keep, [{0}]", in(reg) p, options(nostack, readonly, preserves_flags))
        };
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = p;
    }
}

/// A computation that runs at any level.
pub(crate) trait Kernel {
    type Output;
    /// Implementations are `#[inline(always)]`, as is all that they call.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs `kernel` with the instructions of `level`.
pub(crate) fn dispatch<K: Kernel>(level: SimdLevel, kernel: K) -> K::Output {
    debug_assert!(level.is_available());
    match level {
        SimdLevel::Portable => kernel.run(portable::Portable),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: executors hold only available levels, so the features were detected.
        SimdLevel::Avx2 => unsafe { avx2::run(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        SimdLevel::Avx512 => unsafe { avx512::run(kernel) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        SimdLevel::Neon => unsafe { neon::run(kernel) },
        #[allow(unreachable_patterns)]
        _ => kernel.run(portable::Portable),
    }
}

/// Sums over groups of `GROUP` neighbouring lanes; every lane of a group gets the sum.
#[inline(always)]
pub(crate) fn group_sum<S: Simd, const GROUP: usize>(s: S, mut x: S::V) -> S::V {
    let mut distance = 1;
    while distance < GROUP {
        x = s.add(x, s.swap(x, distance));
        distance *= 2;
    }
    x
}

/// Maximum over groups of `GROUP` neighbouring lanes; every lane of a group gets it.
#[inline(always)]
pub(crate) fn group_max<S: Simd, const GROUP: usize>(s: S, mut x: S::V) -> S::V {
    let mut distance = 1;
    while distance < GROUP {
        x = s.max(x, s.swap(x, distance));
        distance *= 2;
    }
    x
}

//! Atomics, from `std` or from `loom` (cfg `paged_loom`), and lazily committed arrays of them.

#[cfg(paged_loom)]
pub(crate) use loom::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize};
pub(crate) use std::sync::atomic::Ordering;
#[cfg(not(paged_loom))]
pub(crate) use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize};

use crate::error::Result;

/// An atomic whose value zero is all-zero bytes.
///
/// # Safety
/// Without cfg `paged_loom`, all-zero bytes must be a valid `Self` with the value zero.
pub(crate) unsafe trait ZeroAtomic: Sized {
    /// The atomic with value zero.
    #[cfg_attr(not(paged_loom), expect(dead_code, reason = "only loom builds element by element"))]
    fn zero() -> Self;
}

// SAFETY: std guarantees the in-memory representation of `i32`, for which zero bytes are 0.
unsafe impl ZeroAtomic for AtomicI32 {
    fn zero() -> Self {
        Self::new(0)
    }
}

// SAFETY: std guarantees the in-memory representation of `u32`, for which zero bytes are 0.
unsafe impl ZeroAtomic for AtomicU32 {
    fn zero() -> Self {
        Self::new(0)
    }
}

/// Allocates `len` zeros. The operating system commits memory on first touch, so spare capacity costs address space only.
///
/// # Errors
/// [`Error::AllocationFailed`](crate::Error::AllocationFailed) where a plain `Vec` would abort the process.
#[cfg(not(paged_loom))]
pub(crate) fn zeroed<T: ZeroAtomic>(len: usize) -> Result<Box<[T]>> {
    use crate::error::Error;
    use std::alloc::{Layout, alloc_zeroed};

    let failed = || Error::AllocationFailed { bytes: len.saturating_mul(size_of::<T>()) };
    let layout = Layout::array::<T>(len).map_err(|_| failed())?;
    if layout.size() == 0 {
        return Ok(Box::default());
    }
    // SAFETY: the layout has a non-zero size.
    let start = unsafe { alloc_zeroed(layout) }.cast::<T>();
    if start.is_null() {
        return Err(failed());
    }
    // SAFETY: `start` is a fresh allocation of the global allocator with the layout of `[T; len]`, and `ZeroAtomic` makes
    // zero bytes valid elements.
    Ok(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(start, len)) })
}

#[cfg(paged_loom)]
pub(crate) fn zeroed<T: ZeroAtomic>(len: usize) -> Result<Box<[T]>> {
    Ok((0..len).map(|_| T::zero()).collect())
}

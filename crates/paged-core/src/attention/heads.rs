//! Arrays of rows by heads by head dimension, as the kernels see them.

use super::array::Array;
use super::element::ElementType;

/// Addresses of the head rows of a `[rows, heads, head_dim]` or `[rows, heads]` array.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    data: *mut u8,
    pub element: ElementType,
    row_stride_bytes: isize,
    head_stride_bytes: isize,
}

// SAFETY: read by all threads of a launch; what is written is written by one task each.
unsafe impl Send for Heads {}
// SAFETY: as above.
unsafe impl Sync for Heads {}

impl Heads {
    pub fn new<const N: usize>(array: &Array<'_, N>) -> Self {
        Self {
            data: array.data(),
            element: array.element_type(),
            row_stride_bytes: array.stride_bytes(0),
            head_stride_bytes: array.stride_bytes(1),
        }
    }

    /// First element of a head.
    ///
    /// # Safety
    /// `row` and `head` are inside the array.
    #[inline(always)]
    pub unsafe fn at(&self, row: usize, head: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe {
            self.data
                .offset(row as isize * self.row_stride_bytes)
                .offset(head as isize * self.head_stride_bytes)
        }
    }
}

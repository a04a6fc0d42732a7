//! Page pools as the kernels see them: layout by strides, offsets in 64 bits.

use super::array::Array;
use super::element::ElementType;
use crate::error::Result;
use crate::geometry::MAX_PAGE_SIZE;

/// Order of the last three dimensions of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolLayout {
    /// `[num_pages, page_size, num_kv_heads, head_dim]`
    Nhd,
    /// `[num_pages, num_kv_heads, page_size, head_dim]`
    Hnd,
}

/// Largest head dimension that the kernels take.
pub const MAX_HEAD_DIM: usize = 512;
/// Head dimensions are a multiple of this.
pub const HEAD_DIM_MULTIPLE: usize = 16;

/// One pool, K or V, with its strides by meaning instead of by position.
#[derive(Clone, Copy)]
pub(crate) struct Pages {
    data: *mut u8,
    pub element: ElementType,
    pub num_pages: usize,
    pub num_kv_heads: usize,
    pub page_size: usize,
    pub head_dim: usize,
    page_stride_bytes: isize,
    head_stride_bytes: isize,
    token_stride_bytes: isize,
}

// SAFETY: a launch reads the pool from many threads and writes it only while no other thread of the launch runs.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Reads the description of a pool.
    ///
    /// # Errors
    /// `InvalidArgument` if the head dimension is strided or not one that the kernels take, or a dimension is empty.
    pub fn new(pool: &Array<'_, 4>, layout: PoolLayout) -> Result<Self> {
        let shape = pool.shape();
        let (heads, tokens) = match layout {
            PoolLayout::Nhd => (2, 1),
            PoolLayout::Hnd => (1, 2),
        };
        let pages = Self {
            data: pool.data(),
            element: pool.element_type(),
            num_pages: shape[0],
            num_kv_heads: shape[heads],
            page_size: shape[tokens],
            head_dim: shape[3],
            page_stride_bytes: pool.stride_bytes(0),
            head_stride_bytes: pool.stride_bytes(heads),
            token_stride_bytes: pool.stride_bytes(tokens),
        };
        pool.expect_contiguous_rows()?;
        if pages.head_dim == 0
            || pages.head_dim > MAX_HEAD_DIM
            || !pages.head_dim.is_multiple_of(HEAD_DIM_MULTIPLE)
        {
            return Err(pool.invalid(format!(
                "head_dim {}, expected a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}",
                pages.head_dim
            )));
        }
        if pages.num_kv_heads == 0 {
            return Err(pool.invalid("0 KV heads, expected 1 or more"));
        }
        if pages.page_size == 0 || pages.page_size > MAX_PAGE_SIZE {
            return Err(pool.invalid(format!("page_size {}, expected 1 to {MAX_PAGE_SIZE}", pages.page_size)));
        }
        Ok(pages)
    }

    /// K and V of one KV cache.
    ///
    /// # Errors
    /// As [`Pages::new`], or if the two differ in shape or element type.
    pub fn pair(k: &Array<'_, 4>, v: &Array<'_, 4>, layout: PoolLayout) -> Result<(Self, Self)> {
        let k_pages = Self::new(k, layout)?;
        v.expect_shape(k.shape(), "the shape of k_pages")?;
        v.expect_element(k.element_type(), "the element type of k_pages")?;
        Ok((k_pages, Self::new(v, layout)?))
    }

    /// Bytes of one head of one token.
    pub fn row_bytes(&self) -> usize {
        self.head_dim * self.element.size_bytes()
    }

    /// Neighbouring tokens of a head follow each other without a gap.
    #[inline(always)]
    pub fn is_dense(&self) -> bool {
        self.token_stride_bytes == self.row_bytes() as isize
    }

    /// First token of a head in a page.
    ///
    /// # Safety
    /// `page < num_pages` and `head < num_kv_heads`.
    #[inline(always)]
    pub unsafe fn head_of_page(&self, page: usize, head: usize) -> *mut u8 {
        // SAFETY: inside the array that `new` was given.
        unsafe {
            self.data
                .offset(page as isize * self.page_stride_bytes)
                .offset(head as isize * self.head_stride_bytes)
        }
    }

    /// Distance between neighbouring tokens of a head in a page.
    #[inline(always)]
    pub fn token_stride_bytes(&self) -> isize {
        self.token_stride_bytes
    }
}

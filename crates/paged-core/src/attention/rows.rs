//! From token ranges to K and V row pointers, a block at a time.

use super::element::VectorElement;
use super::pages::Pages;
use super::simd::{MAX_LANES, Simd};

/// Most tokens of a block.
pub(crate) const MAX_BLOCK_TOKENS: usize = 64;

/// Rows of consecutive tokens of one KV head. Beyond `len`, up to the next whole tile and the block's size, the last row
/// is repeated, so that a tile reads visible tokens only.
pub(crate) struct Block<T> {
    pub len: usize,
    pub k: [*const T; MAX_BLOCK_TOKENS + MAX_LANES],
    pub v: [*const T; MAX_BLOCK_TOKENS],
    is_dense: bool,
}

impl<T: VectorElement> Block<T> {
    pub fn new() -> Self {
        Self {
            len: 0,
            k: [std::ptr::null(); MAX_BLOCK_TOKENS + MAX_LANES],
            v: [std::ptr::null(); MAX_BLOCK_TOKENS],
            is_dense: true,
        }
    }
}

impl<T: VectorElement> Block<T> {
    /// Asks for a line of a row that will be read next.
    #[inline(always)]
    pub fn prefetch<S: Simd>(&self, s: S, address: *const T) {
        // Rows that lie a power of two apart share few sets of the first-level cache and push each other out of it.
        if self.is_dense { s.prefetch(address.cast()) } else { s.prefetch_kept(address.cast()) }
    }
}

/// Walks a token range of a row.
pub(crate) struct Cursor<'a> {
    k: Pages,
    v: Pages,
    head: usize,
    pages: &'a [i32],
    page: usize,
    slot: usize,
    num_left: usize,
}

impl<'a> Cursor<'a> {
    /// `begin..end` counts tokens from the first of the first page.
    pub fn new((k, v): (Pages, Pages), head: usize, pages: &'a [i32], begin: usize, end: usize) -> Self {
        let page_size = k.page_size;
        Self {
            k,
            v,
            head,
            pages,
            page: begin / page_size,
            slot: begin % page_size,
            num_left: end.saturating_sub(begin),
        }
    }

    /// Fills `block` with the next tokens, at most `max_tokens`, itself at most `MAX_BLOCK_TOKENS`.
    ///
    /// # Safety
    /// The range lies inside `pages`, whose ids are pages of the pools.
    #[inline(always)]
    pub unsafe fn fill<T: VectorElement>(&mut self, block: &mut Block<T>, max_tokens: usize) {
        let num_tokens = self.num_left.min(max_tokens);
        let (k_stride, v_stride) = (self.k.token_stride_bytes(), self.v.token_stride_bytes());
        let mut row = 0;
        while row < num_tokens {
            let run = (self.k.page_size - self.slot).min(num_tokens - row);
            // SAFETY: the caller's promise.
            unsafe {
                let page = *self.pages.get_unchecked(self.page) as usize;
                let mut k = self.k.head_of_page(page, self.head).offset(self.slot as isize * k_stride);
                let mut v = self.v.head_of_page(page, self.head).offset(self.slot as isize * v_stride);
                for i in row..row + run {
                    block.k[i] = k.cast();
                    block.v[i] = v.cast();
                    k = k.wrapping_offset(k_stride);
                    v = v.wrapping_offset(v_stride);
                }
            }
            row += run;
            self.slot += run;
            if self.slot == self.k.page_size {
                self.slot = 0;
                self.page += 1;
            }
        }
        if num_tokens > 0 {
            let (k, v) = (block.k[num_tokens - 1], block.v[num_tokens - 1]);
            block.k[num_tokens..max_tokens + MAX_LANES].fill(k);
            block.v[num_tokens..max_tokens].fill(v);
        }
        block.len = num_tokens;
        block.is_dense = self.k.is_dense();
        self.num_left -= num_tokens;
    }
}

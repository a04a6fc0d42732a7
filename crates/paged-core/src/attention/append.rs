//! Writing new tokens to their pages.

use super::array::Array;
use super::decode::DecodeBatch;
use super::element::{load_any, store_any};
use super::executor::Executor;
use super::heads::Heads;
use super::pages::{Pages, PoolLayout};
use super::sequence::PagedSequence;
use super::simd::{Kernel, Simd, dispatch};
use crate::error::{Error, Result};

/// New keys and values, `[num_tokens, num_kv_heads, head_dim]` each, in any element type.
#[derive(Debug)]
pub struct NewTokens<'a> {
    /// Keys.
    pub k: Array<'a, 3>,
    /// Values.
    pub v: Array<'a, 3>,
}

/// Pools that tokens are written to, checked together with the tokens.
pub(crate) struct Append {
    k_new: Heads,
    v_new: Heads,
    k: Pages,
    v: Pages,
}

impl Append {
    /// # Errors
    /// `InvalidArgument` or `InvalidType` naming the array that does not fit.
    pub fn new(
        new: &NewTokens<'_>,
        num_tokens: usize,
        k_pages: &Array<'_, 4>,
        v_pages: &Array<'_, 4>,
        (k, v): (Pages, Pages),
    ) -> Result<Self> {
        for new in [&new.k, &new.v] {
            new.expect_shape(
                [num_tokens, k.num_kv_heads, k.head_dim],
                "[num_tokens, num_kv_heads, head_dim]",
            )?;
            new.expect_contiguous_rows()?;
        }
        for pages in [k_pages, v_pages] {
            pages.expect_writable()?;
            pages.expect_apart(&new.k)?;
            pages.expect_apart(&new.v)?;
        }
        v_pages.expect_distinct(k_pages)?;
        Ok(Self { k_new: Heads::new(&new.k), v_new: Heads::new(&new.v), k, v })
    }

    /// Writes row `row` of the new tokens to a slot of a page.
    ///
    /// # Safety
    /// `row`, `page` and `slot` are inside the arrays, and no other thread touches the slot.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, s: S, row: usize, page: usize, slot: usize) {
        for head in 0..self.k.num_kv_heads {
            for (new, pages) in [(&self.k_new, &self.k), (&self.v_new, &self.v)] {
                // SAFETY: the caller's promise; `new` and the pools do not overlap.
                unsafe {
                    let to =
                        pages.head_of_page(page, head).offset(slot as isize * pages.token_stride_bytes());
                    copy_row(s, new, new.at(row, head), pages, to);
                }
            }
        }
    }
}

/// # Safety
/// `head_dim` elements are readable at `from` and writable at `to`, apart from each other.
#[inline(always)]
unsafe fn copy_row<S: Simd>(s: S, new: &Heads, from: *const u8, pages: &Pages, to: *mut u8) {
    // SAFETY: the caller's promise; head_dim is a multiple of the lanes.
    unsafe {
        if new.element == pages.element {
            std::ptr::copy_nonoverlapping(from, to, pages.row_bytes());
            return;
        }
        let mut i = 0;
        while i < pages.head_dim {
            let x = load_any(s, new.element, from.add(i * new.element.size_bytes()));
            store_any(s, pages.element, to.add(i * pages.element.size_bytes()), x);
            i += S::LANES;
        }
    }
}

/// Writes of a whole launch: `(row of the new tokens, page, slot)`.
pub(crate) struct Writes<'a, I> {
    pub append: &'a Append,
    pub places: I,
}

impl<I: Iterator<Item = (usize, usize, usize)>> Kernel for Writes<'_, I> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (row, page, slot) in self.places {
            // SAFETY: the batch or the sequence was checked against the pools; one thread writes.
            unsafe { self.append.write(s, row, page, slot) };
        }
    }
}

/// Writes the last `T` tokens of a sequence: `new` holds `[T, num_kv_heads, head_dim]`.
///
/// # Errors
/// `InvalidArgument` or `InvalidType` naming the argument; nothing is written then.
pub fn write_pages(
    executor: &Executor,
    new: &NewTokens<'_>,
    k_pages: &Array<'_, 4>,
    v_pages: &Array<'_, 4>,
    layout: PoolLayout,
    sequence: PagedSequence<'_>,
) -> Result<()> {
    let pools = Pages::pair(k_pages, v_pages, layout)?;
    sequence.check(&pools.0)?;
    let num_new = new.k.shape()[0];
    if num_new > sequence.num_tokens {
        let held = sequence.num_tokens;
        return Err(Error::invalid(
            "num_tokens",
            format!("{held} tokens are fewer than the {num_new} of {}", new.k.name()),
        ));
    }
    let append = Append::new(new, num_new, k_pages, v_pages, pools)?;
    dispatch(
        executor.simd(),
        Writes { append: &append, places: sequence.places_of_last(num_new, pools.0.page_size) },
    );
    Ok(())
}

/// Writes the last token of every row of a decode batch: `new` holds `[num_rows, num_kv_heads, head_dim]`.
///
/// # Errors
/// `InvalidArgument` or `InvalidType` naming the argument, also for a row without tokens; nothing is written then.
pub fn write_decode(
    executor: &Executor,
    new: &NewTokens<'_>,
    k_pages: &Array<'_, 4>,
    v_pages: &Array<'_, 4>,
    layout: PoolLayout,
    batch: &DecodeBatch<'_>,
) -> Result<()> {
    let pools = Pages::pair(k_pages, v_pages, layout)?;
    batch.check(&pools.0)?;
    batch.expect_a_token_per_row(new.k.name())?;
    let append = Append::new(new, batch.rows.len(), k_pages, v_pages, pools)?;
    dispatch(executor.simd(), Writes { append: &append, places: batch.last_places(pools.0.page_size) });
    Ok(())
}

/// Copies a page of a pool to another: all heads and tokens, whatever the layout.
///
/// # Errors
/// `InvalidArgument` for a page id outside the pool, or a pool that is read-only or has other than 4 dimensions'
/// distinct elements.
pub fn copy_page(pages: &Array<'_, 4>, from: usize, to: usize) -> Result<()> {
    pages.expect_writable()?;
    let shape = pages.shape();
    for (argument, page) in [("src", from), ("dst", to)] {
        if page >= shape[0] {
            return Err(Error::invalid(argument, format!("page {page}, the pool has {}", shape[0])));
        }
    }
    if from == to || shape.contains(&0) {
        return Ok(());
    }
    pages.expect_contiguous_rows()?;
    let [page_stride, outer_stride, inner_stride] = [0, 1, 2].map(|dimension| pages.stride_bytes(dimension));
    let row_bytes = shape[3] * pages.element_type().size_bytes();
    // Whole pages in one copy where the rows follow each other without gaps.
    let dense = inner_stride == row_bytes as isize && outer_stride == inner_stride * shape[2] as isize;
    let (num_outer, num_inner, run) =
        if dense { (1, 1, shape[1] * shape[2] * row_bytes) } else { (shape[1], shape[2], row_bytes) };
    for outer in 0..num_outer {
        for inner in 0..num_inner {
            let row = outer as isize * outer_stride + inner as isize * inner_stride;
            // SAFETY: inside the array; pages of a writable array do not overlap.
            unsafe {
                let source = pages.data().offset(from as isize * page_stride + row);
                let target = pages.data().offset(to as isize * page_stride + row);
                std::ptr::copy_nonoverlapping(source, target, run);
            }
        }
    }
    Ok(())
}

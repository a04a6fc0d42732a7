//! The page table of one sequence in one KV group: which pages hold its tokens, in order.
//!
//! The table holds one reference in the pool for each of its pages and releases them when dropped. Its caller writes the KV
//! of appended tokens; the table says where. Positions are absolute: `num_tokens` counts from the start of the sequence, and
//! a window table forgets whole pages at its head, never single tokens.
//!
//! ```text
//! absolute tokens   0 ........ head_page * page_size ........ num_tokens - kv_len ........ num_tokens
//!                   [ pages given back )[ held, out of view (first_page_offset) )[ visible (kv_len) )
//! ```

mod append;
mod batch;
mod clock;
mod shared_steps;
mod window;

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::geometry::{MAX_INDEX, PageGeometry, check_count};
use crate::ids::PageId;
use crate::pool::PagePool;
pub use append::Append;
pub use batch::pages_needed_by;
pub(crate) use batch::{Reserved, reserve};
pub(crate) use clock::StepClock;

/// The pages of one sequence in one KV group.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use paged_core::{PagePool, PageTable};
///
/// let pool = Arc::new(PagePool::new(8)?);
/// let mut table = PageTable::new(Arc::clone(&pool), 16, None)?;
/// table.append(20)?;
/// assert_eq!((table.pages().len(), table.last_page_len()), (2, 4));
///
/// let mut fork = table.fork()?;
/// let append = fork.append(1)?; // the shared partial page is copied first
/// assert_eq!(append.copies.len(), 1);
/// drop((table, fork));
/// assert_eq!(pool.num_free(), 8);
/// # Ok::<(), paged_core::Error>(())
/// ```
pub struct PageTable {
    pool: Arc<PagePool>,
    geometry: PageGeometry,
    window: Option<usize>,
    /// Held pages; the first is the sequence's page number `head_page`.
    pages: Vec<PageId>,
    head_page: usize,
    /// Tokens beside those that `clock` counts; wraps below 0.
    own_tokens: usize,
    /// The steps of the decode batch that the table is in.
    clock: Option<Arc<StepClock>>,
}

impl PageTable {
    /// Creates an empty table. `window` is the number of visible tokens, the newest included.
    ///
    /// # Errors
    /// `InvalidArgument` for a page size out of range or a window of 0.
    pub fn new(pool: Arc<PagePool>, page_size: usize, window: Option<usize>) -> Result<Self> {
        let geometry = PageGeometry::new(page_size)?;
        if let Some(window) = window {
            check_count("window", window, MAX_INDEX)?;
        }
        Ok(Self { pool, geometry, window, pages: Vec::new(), head_page: 0, own_tokens: 0, clock: None })
    }

    /// Tokens appended since the start: the absolute position of the next token.
    pub fn num_tokens(&self) -> usize {
        // A batch may take a step at any moment: every operation asks once.
        match &self.clock {
            None => self.own_tokens,
            Some(clock) => self.own_tokens.wrapping_add(clock.num_steps() as usize),
        }
    }

    /// Visible tokens: `num_tokens`, or at most the window.
    pub fn kv_len(&self) -> usize {
        self.visible(self.num_tokens())
    }

    /// Held pages, in order.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Pages given back at the head: the sequence's page number of `pages()[0]`.
    pub fn head_page(&self) -> usize {
        self.head_page
    }

    /// Tokens in the held pages, those out of view at the head included. A prefill chunk that has to see what its first
    /// token sees passes this with a `first_page_offset` of 0.
    pub fn num_held_tokens(&self) -> usize {
        self.held(self.num_tokens())
    }

    /// Held tokens before the first visible one. Less than `page_size` after [`retire_head`](Self::retire_head).
    pub fn first_page_offset(&self) -> usize {
        let num_tokens = self.num_tokens();
        self.held(num_tokens) - self.visible(num_tokens)
    }

    /// Tokens in the last page: `1..=page_size`, or 0 for an empty table.
    pub fn last_page_len(&self) -> usize {
        self.geometry.last_page_len(self.num_tokens())
    }

    /// Tokens per page.
    pub fn page_size(&self) -> usize {
        self.geometry.page_size()
    }

    /// Visible tokens at most, if limited.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Creates a second table on the same pages, each of which gets one more holder.
    ///
    /// # Errors
    /// `Corrupt` if the table's pages were released behind its back.
    pub fn fork(&self) -> Result<Self> {
        self.pool.retain(&self.pages)?;
        Ok(Self {
            pool: Arc::clone(&self.pool),
            pages: self.pages.clone(),
            own_tokens: self.num_tokens(),
            clock: None,
            ..*self
        })
    }

    /// Starts an empty table without a window on full pages that somebody else holds too; each gets one more holder.
    ///
    /// # Errors
    /// `InvalidArgument` for a table that is not empty or has a window, a page outside the pool, or more tokens than a table
    /// counts; `Corrupt` for a page that is free. The table stays empty then.
    pub fn adopt(&mut self, pages: &[PageId]) -> Result<()> {
        self.leave_clock();
        if self.own_tokens != 0 || self.window.is_some() {
            let message = format!(
                "{} tokens held, window {:?}: only an empty table adopts",
                self.own_tokens, self.window
            );
            return Err(Error::invalid("pages", message));
        }
        let num_tokens = pages.len().saturating_mul(self.geometry.page_size());
        if num_tokens > MAX_INDEX {
            return Err(Error::invalid("pages", format!("{num_tokens} tokens, at most {MAX_INDEX}")));
        }
        self.pool.retain(pages)?;
        self.pages = pages.to_vec();
        self.own_tokens = num_tokens;
        Ok(())
    }

    /// Releases every page and starts over as an empty table. A second call does nothing.
    ///
    /// # Errors
    /// `Corrupt` if the table's pages were released behind its back; the table is empty even so.
    pub fn release(&mut self) -> Result<()> {
        self.leave_clock();
        self.head_page = 0;
        self.own_tokens = 0;
        self.pool.release(&std::mem::take(&mut self.pages))
    }

    fn visible(&self, num_tokens: usize) -> usize {
        self.window.map_or(num_tokens, |window| num_tokens.min(window))
    }

    fn held(&self, num_tokens: usize) -> usize {
        num_tokens - self.head_page * self.geometry.page_size()
    }

    /// Checks the table against the pool.
    ///
    /// # Errors
    /// `Corrupt` if a page is not held or the page count does not fit the tokens.
    pub fn check_integrity(&self) -> Result<()> {
        let expected = self.geometry.pages_for(self.num_held_tokens());
        if self.pages.len() != expected {
            return Err(Error::corrupt(format!("table holds {} pages, needs {expected}", self.pages.len())));
        }
        for &page in &self.pages {
            if self.pool.refcount(page)? == 0 {
                return Err(Error::corrupt(format!("page {page} of a table is free")));
            }
        }
        Ok(())
    }
}

impl Drop for PageTable {
    fn drop(&mut self) {
        // Fails only if pages were released behind the table's back; `check_integrity` reports that where it can be handled.
        let _ = self.release();
    }
}

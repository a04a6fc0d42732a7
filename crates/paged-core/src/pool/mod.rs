//! The page pool: which pages are free, and how many holders each other page has.
//!
//! Every operation works from any thread without a lock. `acquire` takes pages with one holder, `retain` adds a holder,
//! `release` drops one; a page returns to the free list with its last holder. A page with two or more holders is shared and
//! must not be written (`is_shared` is the copy-on-write test).
//!
//! Invariant, checked by [`PagePool::check_integrity`]: a page is in the free list exactly if its count is 0.

mod free_list;
mod integrity;
mod refcount;

use crossbeam_utils::CachePadded;

use crate::error::{Error, Result};
use crate::geometry::{MAX_INDEX, check_count};
use crate::ids::PageId;
use crate::primitive::{AtomicU64, Ordering};
use free_list::FreeList;
use refcount::{Refcounts, Refused};

/// A fixed number of pages with lock-free acquire, retain and release.
///
/// # Examples
/// ```
/// let pool = paged_core::PagePool::new(8)?;
/// let pages = pool.acquire(3)?;
/// pool.retain(&pages[..1])?;
/// assert!(pool.is_shared(pages[0])?);
/// pool.release(&pages)?;
/// assert_eq!(pool.num_free(), 7);
/// # Ok::<(), paged_core::Error>(())
/// ```
pub struct PagePool {
    free: FreeList,
    refcounts: Refcounts,
    /// Calls that gave some page another holder.
    num_shares: CachePadded<AtomicU64>,
}

impl PagePool {
    /// Creates a pool of `num_pages` free pages. Its memory is committed as pages are first used.
    ///
    /// # Errors
    /// `InvalidArgument` unless `1 <= num_pages < 2^31`; `AllocationFailed`.
    pub fn new(num_pages: usize) -> Result<Self> {
        let count = check_count("num_pages", num_pages, MAX_INDEX)?;
        Ok(Self {
            free: FreeList::new(count as u32)?,
            refcounts: Refcounts::new(count)?,
            num_shares: CachePadded::new(AtomicU64::new(0)),
        })
    }

    /// Pages of the pool.
    pub fn num_pages(&self) -> usize {
        self.refcounts.len()
    }

    /// Free pages; while other threads work, a moment's value.
    pub fn num_free(&self) -> usize {
        self.free.num_free()
    }

    /// Pages with at least one holder.
    pub fn num_used(&self) -> usize {
        self.num_pages().saturating_sub(self.num_free())
    }

    /// Grows whenever a page may have got another holder: as long as it stands still, a page that had one holder has no more.
    /// Whoever keeps the number reads it before the holders.
    pub fn num_shares(&self) -> u64 {
        // Pairs with the Release addition in `note_share`: who sees it sees the counts that were changed before.
        self.num_shares.load(Ordering::Acquire)
    }

    /// Takes `num_pages` pages, each with one holder: the caller.
    ///
    /// # Errors
    /// `OutOfPages` if fewer are free; none is taken then.
    pub fn acquire(&self, num_pages: usize) -> Result<Vec<PageId>> {
        let pages = self.free.pop(num_pages).map_err(|free| Error::OutOfPages { needed: num_pages, free })?;
        for &page in &pages {
            self.refcounts.set_acquired(page);
        }
        Ok(pages)
    }

    /// Adds one holder to each page; a page named twice gets two.
    ///
    /// # Errors
    /// `InvalidArgument` for an id outside the pool, `Corrupt` for a free page. No count is changed then.
    pub fn retain(&self, pages: &[PageId]) -> Result<()> {
        for &page in pages {
            if self.count_of("pages", page)? == 0 {
                return Err(Error::corrupt(format!("retain of free page {page}")));
            }
        }
        for (done, &page) in pages.iter().enumerate() {
            if let Err(refused) = self.refcounts.retain(page) {
                // A holder let go between the check and here: give back what this call took.
                self.release_checked(&pages[..done])?;
                return Err(match refused {
                    Refused::Free => Error::corrupt(format!("retain of free page {page}")),
                    Refused::Overflow => Error::corrupt(format!("page {page} has too many holders")),
                });
            }
        }
        self.note_share();
        Ok(())
    }

    /// Drops one holder of each page; pages without holders become free. A page named twice loses two holders.
    ///
    /// # Errors
    /// `InvalidArgument` for an id outside the pool, `Corrupt` for a page that has fewer holders than the call drops (double
    /// release). No count is changed then.
    pub fn release(&self, pages: &[PageId]) -> Result<()> {
        for &page in pages {
            if self.count_of("pages", page)? == 0 {
                return Err(Error::corrupt(format!("double release of page {page}")));
            }
        }
        if let Some(page) = self.over_released(pages) {
            return Err(Error::corrupt(format!("double release of page {page}")));
        }
        self.release_checked(pages)
    }

    /// Number of holders of a page, 0 if it is free.
    ///
    /// # Errors
    /// `InvalidArgument` for an id outside the pool.
    pub fn refcount(&self, page: PageId) -> Result<u32> {
        self.count_of("page", page)
    }

    /// True if the page has two or more holders, so that a writer has to copy it first.
    ///
    /// # Errors
    /// `InvalidArgument` for an id outside the pool.
    pub fn is_shared(&self, page: PageId) -> Result<bool> {
        Ok(self.refcount(page)? > 1)
    }

    /// After the counts have changed: who has read a count too early finds another number next time.
    fn note_share(&self) {
        // Pairs with the Acquire load in `num_shares`.
        self.num_shares.fetch_add(1, Ordering::Release);
    }

    fn count_of(&self, argument: &'static str, page: PageId) -> Result<u32> {
        if page as usize >= self.num_pages() {
            return Err(Error::invalid(
                argument,
                format!("expected page ids in 0..{}, got {page}", self.num_pages()),
            ));
        }
        Ok(self.refcounts.get(page))
    }

    /// A page that `pages` names more often than it has holders.
    fn over_released(&self, pages: &[PageId]) -> Option<PageId> {
        if pages.len() < 2 {
            return None;
        }
        let mut sorted = pages.to_vec();
        sorted.sort_unstable();
        sorted
            .chunk_by(|a, b| a == b)
            .find(|run| self.refcounts.get(run[0]) < run.len() as u32)
            .map(|run| run[0])
    }

    /// Drops one holder each. Only a racing double release can still fail here; it is undone.
    fn release_checked(&self, pages: &[PageId]) -> Result<()> {
        let mut freed = Vec::new();
        for (done, &page) in pages.iter().enumerate() {
            match self.refcounts.release(page) {
                Ok(true) => freed.push(page),
                Ok(false) => {}
                Err(_) => {
                    for &page in &pages[..done] {
                        self.refcounts.undo_release(page);
                    }
                    self.note_share();
                    return Err(Error::corrupt(format!("double release of page {page}")));
                }
            }
        }
        self.free.push(&freed);
        Ok(())
    }
}

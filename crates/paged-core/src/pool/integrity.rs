//! The pool's invariant, checked page by page.

use super::PagePool;
use crate::error::{Error, Result};
use crate::ids::PageId;

impl PagePool {
    /// Checks that a page is in the free list exactly if its count is 0, that none is listed twice, and that the counter of
    /// free pages agrees. Takes time and memory proportional to the pool.
    ///
    /// # Errors
    /// `Corrupt` with the first violation. Also while other threads change the pool, which then means nothing.
    pub fn check_integrity(&self) -> Result<()> {
        let mut listed = vec![false; self.num_pages()];
        let free = self.free.walk(self.num_pages() + 1);
        for &page in &free {
            if std::mem::replace(&mut listed[page as usize], true) {
                return Err(Error::corrupt(format!("page {page} is in the free list twice")));
            }
            let count = self.refcounts.get(page);
            if count != 0 {
                return Err(Error::corrupt(format!("page {page} is in the free list with {count} holders")));
            }
        }
        let lost =
            (0..self.num_pages()).find(|&page| !listed[page] && self.refcounts.get(page as PageId) == 0);
        if let Some(page) = lost {
            return Err(Error::corrupt(format!("page {page} has no holder and is not in the free list")));
        }
        if free.len() != self.num_free() {
            return Err(Error::corrupt(format!(
                "free list holds {} pages, counter says {}",
                free.len(),
                self.num_free()
            )));
        }
        Ok(())
    }
}

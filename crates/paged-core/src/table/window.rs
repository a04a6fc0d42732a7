//! Sliding windows: head pages go back to the pool once no token can see them.

use super::PageTable;
use crate::error::Result;
use crate::ids::PageId;

impl PageTable {
    /// Gives back the head pages that neither the last appended token nor any later one sees, and returns them.
    ///
    /// The last token's own window is kept whole, so the call is safe before that token's attention has run. Without a window
    /// it returns nothing.
    ///
    /// # Errors
    /// `Corrupt` if the table's pages were released behind its back; nothing is given back then.
    pub fn retire_head(&mut self) -> Result<Vec<PageId>> {
        let num_pages = (self.first_page_offset() / self.page_size()).min(self.pages.len());
        self.pool.release(&self.pages[..num_pages])?;
        self.head_page += num_pages;
        Ok(self.pages.drain(..num_pages).collect())
    }
}

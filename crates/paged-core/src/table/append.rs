//! Growth by tokens: fresh pages on demand, and the copy of a shared last page before it is written.

use super::PageTable;
use crate::error::{Error, Result};
use crate::geometry::MAX_INDEX;
use crate::ids::PageId;

/// What an append took from the pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Append {
    /// Pages added at the tail, in order. The target of a copy is not among them.
    pub new_pages: Vec<PageId>,
    /// Pages to copy, `(source, target)`: the target has replaced the source in the table. The source may already be free, so
    /// a step runs its copies before it writes any page.
    pub copies: Vec<(PageId, PageId)>,
}

impl PageTable {
    /// Fresh pages that `append(num_tokens)` would take, a copy-on-write target included.
    ///
    /// # Errors
    /// `InvalidArgument` if the sequence would exceed 2^31 - 1 tokens.
    pub fn pages_needed(&self, num_tokens: usize) -> Result<usize> {
        let grown = self.grown_pages(num_tokens)? - self.pages.len();
        Ok(grown + usize::from(self.writes_shared_page(num_tokens)?))
    }

    /// Makes room for `num_tokens` tokens after the last one.
    ///
    /// If the last page is partial and shared, it is replaced by a fresh page, and the caller has to copy its contents.
    ///
    /// # Errors
    /// `InvalidArgument` as for [`pages_needed`](Self::pages_needed); `OutOfPages`. The table is unchanged then.
    pub fn append(&mut self, num_tokens: usize) -> Result<Append> {
        let grown = self.grown_pages(num_tokens)? - self.pages.len();
        let copy = self.writes_shared_page(num_tokens)?;
        let mut fresh = self.pool.acquire(grown + usize::from(copy))?;
        let mut copies = Vec::new();
        if copy
            && let Some(last) = self.pages.last_mut()
            && let Some(target) = fresh.pop()
        {
            let source = *last;
            if let Err(error) = self.pool.release(&[source]) {
                fresh.push(target);
                self.pool.release(&fresh)?;
                return Err(error);
            }
            *last = target;
            copies.push((source, target));
        }
        self.pages.extend_from_slice(&fresh);
        self.num_tokens += num_tokens;
        Ok(Append { new_pages: fresh, copies })
    }

    /// True if the last page has room for `num_tokens` tokens and no other holder: what most rows of most steps are asked, so
    /// it does without divisions.
    pub(super) fn takes_nothing(&self, num_tokens: usize) -> Result<bool> {
        let Some(&last) = self.pages.last() else { return Ok(num_tokens == 0) };
        let room = self.pages.len() * self.page_size() - self.num_held_tokens();
        Ok(num_tokens <= room && self.num_tokens + room <= MAX_INDEX && !self.pool.is_shared(last)?)
    }

    /// Pages that hold the held tokens and `num_tokens` more.
    pub(super) fn grown_pages(&self, num_tokens: usize) -> Result<usize> {
        match self.num_tokens.checked_add(num_tokens) {
            Some(total) if total <= MAX_INDEX => {
                Ok(self.geometry.pages_for(total - self.head_page * self.geometry.page_size()))
            }
            _ => Err(Error::invalid(
                "num_tokens",
                format!("{} tokens and {num_tokens} more exceed {MAX_INDEX}", self.num_tokens),
            )),
        }
    }

    pub(super) fn writes_shared_page(&self, num_tokens: usize) -> Result<bool> {
        match self.pages.last() {
            Some(&last) if num_tokens > 0 && self.last_page_len() < self.page_size() => {
                self.pool.is_shared(last)
            }
            _ => Ok(false),
        }
    }
}

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
        let held = self.num_tokens();
        let grown = self.grown_pages(held, num_tokens)? - self.pages.len();
        Ok(grown + usize::from(self.writes_shared_page(held, num_tokens)?))
    }

    /// Makes room for `num_tokens` tokens after the last one.
    ///
    /// If the last page is partial and shared, it is replaced by a fresh page, and the caller has to copy its contents.
    ///
    /// # Errors
    /// `InvalidArgument` as for [`pages_needed`](Self::pages_needed); `OutOfPages`. The table is unchanged then.
    pub fn append(&mut self, num_tokens: usize) -> Result<Append> {
        self.leave_clock();
        let held = self.own_tokens;
        let grown = self.grown_pages(held, num_tokens)? - self.pages.len();
        let copy = self.writes_shared_page(held, num_tokens)?;
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
        self.own_tokens += num_tokens;
        Ok(Append { new_pages: fresh, copies })
    }

    /// True if the last page has room for `num_tokens` tokens and no other holder: what most rows of most steps are asked, so
    /// it does without divisions.
    pub(super) fn takes_nothing(&self, num_tokens: usize) -> Result<bool> {
        let Some(&last) = self.pages.last() else { return Ok(num_tokens == 0) };
        Ok(num_tokens <= self.room(self.num_tokens()) && !self.pool.is_shared(last)?)
    }

    /// Tokens that fit beside `held` tokens without another page, and do not exceed what a table counts.
    pub(super) fn room(&self, held: usize) -> usize {
        (self.pages.len() * self.page_size() - self.held(held)).min(MAX_INDEX - held)
    }

    /// Pages for `num_tokens` tokens beside the `held` ones.
    pub(super) fn grown_pages(&self, held: usize, num_tokens: usize) -> Result<usize> {
        match held.checked_add(num_tokens) {
            Some(total) if total <= MAX_INDEX => Ok(self.geometry.pages_for(self.held(total))),
            _ => Err(Error::invalid(
                "num_tokens",
                format!("{held} tokens and {num_tokens} more exceed {MAX_INDEX}"),
            )),
        }
    }

    pub(super) fn writes_shared_page(&self, held: usize, num_tokens: usize) -> Result<bool> {
        match self.pages.last() {
            Some(&last) if num_tokens > 0 && self.geometry.last_page_len(held) < self.page_size() => {
                self.pool.is_shared(last)
            }
            _ => Ok(false),
        }
    }
}

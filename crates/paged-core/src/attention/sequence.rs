//! The pages of one sequence.

use super::pages::Pages;
use crate::error::{Error, Result};

/// Tokens of one sequence: `num_tokens` of them from entry `first_page_offset` of the first page on.
#[derive(Clone, Copy, Debug)]
pub struct PagedSequence<'a> {
    /// Page ids in token order; more than needed may be given.
    pub page_ids: &'a [i32],
    /// Entry of the first page that holds the first token.
    pub first_page_offset: usize,
    /// Tokens held.
    pub num_tokens: usize,
}

impl<'a> PagedSequence<'a> {
    /// Checks the sequence against a pool.
    ///
    /// # Errors
    /// `InvalidArgument` naming `first_page_offset`, `num_tokens` or `page_ids`.
    pub(crate) fn check(&self, pages: &Pages) -> Result<()> {
        let page_size = pages.page_size;
        if self.first_page_offset >= page_size {
            let found = self.first_page_offset;
            return Err(Error::invalid(
                "first_page_offset",
                format!("{found}, expected less than page_size {page_size}"),
            ));
        }
        let needed = self.used_pages(page_size).filter(|needed| *needed <= self.page_ids.len());
        let Some(needed) = needed else {
            let (given, held) = (self.page_ids.len(), self.num_tokens);
            return Err(Error::invalid(
                "num_tokens",
                format!(
                    "{held} tokens from entry {} on do not fit {given} pages of {page_size}",
                    self.first_page_offset
                ),
            ));
        };
        match self.page_ids[..needed]
            .iter()
            .find(|page| usize::try_from(**page).map_or(true, |page| page >= pages.num_pages))
        {
            Some(page) => {
                Err(Error::invalid("page_ids", format!("page {page}, the pool has {}", pages.num_pages)))
            }
            None => Ok(()),
        }
    }

    fn used_pages(&self, page_size: usize) -> Option<usize> {
        if self.num_tokens == 0 {
            return Some(0);
        }
        Some(self.first_page_offset.checked_add(self.num_tokens)?.div_ceil(page_size))
    }

    /// `(index, page, slot)` of the last `num` tokens. The sequence was checked and holds that many.
    pub(crate) fn places_of_last(
        self,
        num: usize,
        page_size: usize,
    ) -> impl Iterator<Item = (usize, usize, usize)> + 'a {
        let first = self.first_page_offset + self.num_tokens - num;
        (0..num).map(move |i| (i, self.page_ids[(first + i) / page_size] as usize, (first + i) % page_size))
    }
}

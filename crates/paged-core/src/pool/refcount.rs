//! One reference count per page; 0 means free.
//!
//! A count leaves 0 only by `set_acquired`, called by the thread that took the page off the free list. `retain` and
//! `release` are exchanges that refuse to touch a 0, so misuse is detected at the page and changes nothing.

use crate::error::Result;
use crate::ids::PageId;
use crate::primitive::{AtomicU32, Ordering, zeroed};

pub(super) struct Refcounts {
    counts: Box<[AtomicU32]>,
}

/// Why a count was left as it was.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Free,
    Overflow,
}

impl Refcounts {
    pub(super) fn new(num_pages: usize) -> Result<Self> {
        Ok(Self { counts: zeroed(num_pages)? })
    }

    pub(super) fn len(&self) -> usize {
        self.counts.len()
    }

    pub(super) fn get(&self, page: PageId) -> u32 {
        // Pairs with the AcqRel exchanges below: who reads 1 after another's release also sees that holder's writes.
        self.counts[page as usize].load(Ordering::Acquire)
    }

    pub(super) fn set_acquired(&self, page: PageId) {
        // Pairs with the Acquire loads in `get`, `retain` and `release`.
        self.counts[page as usize].store(1, Ordering::Release);
    }

    pub(super) fn retain(&self, page: PageId) -> Result<(), Refused> {
        self.change(page, |count| count.checked_add(1).ok_or(Refused::Overflow)).map(|_| ())
    }

    /// Drops one reference; true if it was the last.
    pub(super) fn release(&self, page: PageId) -> Result<bool, Refused> {
        self.change(page, |count| Ok(count - 1)).map(|count| count == 0)
    }

    /// Takes back a `release` that has not been followed by a push to the free list.
    pub(super) fn undo_release(&self, page: PageId) {
        // Pairs with the AcqRel exchanges in `change`.
        self.counts[page as usize].fetch_add(1, Ordering::AcqRel);
    }

    fn change(&self, page: PageId, next: impl Fn(u32) -> Result<u32, Refused>) -> Result<u32, Refused> {
        let cell = &self.counts[page as usize];
        // Pairs with the AcqRel exchange below and the Release store in `set_acquired`.
        let mut count = cell.load(Ordering::Acquire);
        loop {
            if count == 0 {
                return Err(Refused::Free);
            }
            let new = next(count)?;
            // AcqRel: the last release acquires what every earlier holder did before its own release.
            match cell.compare_exchange(count, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(new),
                Err(now) => count = now,
            }
        }
    }
}

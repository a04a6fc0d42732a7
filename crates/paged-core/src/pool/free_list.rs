//! Lock-free stack of free page ids: Treiber's stack (R. K. Treiber, IBM RJ 5118, 1986) over indices.
//!
//! The head packs a tag beside the index; every successful exchange increments the tag, so a head that was popped and
//! pushed back in between never compares equal (ABA). A whole chain is taken or given with one exchange: `pop` of n pages is
//! all or nothing in one step, and no thread ever sees part of it.
//!
//! Links are stored relative to the next index, so zeroed memory is the initial list 0, 1, 2, ... and a fresh list costs
//! no time and no memory.

use crossbeam_utils::CachePadded;

use crate::error::Result;
use crate::ids::PageId;
use crate::primitive::{AtomicU32, AtomicU64, AtomicUsize, Ordering, zeroed};

pub(super) struct FreeList {
    /// Tag in the upper 32 bits, index of the first free page in the lower 32; index `num_pages` ends the list.
    head: CachePadded<AtomicU64>,
    /// Free pages; never less than the length of the list, equal to it when no call is under way.
    num_free: CachePadded<AtomicUsize>,
    /// `next(i) - (i + 1)`, wrapping.
    links: Box<[AtomicU32]>,
}

const fn pack(tag: u32, index: u32) -> u64 {
    (tag as u64) << 32 | index as u64
}

const fn unpack(head: u64) -> (u32, u32) {
    ((head >> 32) as u32, head as u32)
}

impl FreeList {
    pub(super) fn new(num_pages: u32) -> Result<Self> {
        Ok(Self {
            head: CachePadded::new(AtomicU64::new(pack(0, 0))),
            num_free: CachePadded::new(AtomicUsize::new(num_pages as usize)),
            links: zeroed(num_pages as usize)?,
        })
    }

    pub(super) fn num_free(&self) -> usize {
        // Pairs with the AcqRel updates in `pop` and `push`.
        self.num_free.load(Ordering::Acquire)
    }

    fn end(&self) -> u32 {
        self.links.len() as u32
    }

    fn next(&self, index: u32) -> u32 {
        // Pairs with the Release store in `set_next`. A stale link is still an index or the end; the exchange of the head
        // then fails.
        self.links[index as usize].load(Ordering::Acquire).wrapping_add(index + 1)
    }

    fn set_next(&self, index: u32, next: u32) {
        // Pairs with the Acquire load in `next`.
        self.links[index as usize].store(next.wrapping_sub(index + 1), Ordering::Release);
    }

    /// Takes `count` pages, or none and says how many there were.
    pub(super) fn pop(&self, count: usize) -> Result<Vec<PageId>, usize> {
        if count > self.links.len() {
            return Err(self.num_free());
        }
        let mut pages = Vec::new();
        // Pairs with the AcqRel exchanges in `pop` and `push`: links written before a push are seen.
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let (tag, mut index) = unpack(head);
            pages.clear();
            while pages.len() < count && index != self.end() {
                pages.push(index);
                index = self.next(index);
            }
            if pages.len() < count {
                // The list ended early: true only if nobody changed it during the walk.
                // Pairs with the AcqRel exchanges in `pop` and `push`.
                let now = self.head.load(Ordering::Acquire);
                if now == head {
                    return Err(pages.len());
                }
                head = now;
                continue;
            }
            // AcqRel: Release orders our reads of the links before the change, for the Acquire loads of other walks.
            match self.head.compare_exchange(
                head,
                pack(tag.wrapping_add(1), index),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    // Pairs with the Acquire load in `num_free`.
                    self.num_free.fetch_sub(count, Ordering::AcqRel);
                    return Ok(pages);
                }
                Err(now) => head = now,
            }
        }
    }

    /// Gives pages back. The caller owns them: none is in the list.
    pub(super) fn push(&self, pages: &[PageId]) {
        let (Some(&first), Some(&last)) = (pages.first(), pages.last()) else { return };
        for pair in pages.windows(2) {
            self.set_next(pair[0], pair[1]);
        }
        // Counted before they can be popped, so the count never wraps. Pairs with the Acquire load in `num_free`.
        self.num_free.fetch_add(pages.len(), Ordering::AcqRel);
        // Pairs with the AcqRel exchanges in `pop` and `push`.
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let (tag, index) = unpack(head);
            self.set_next(last, index);
            // AcqRel: publishes the links to the Acquire loads of the head in `pop`.
            match self.head.compare_exchange(
                head,
                pack(tag.wrapping_add(1), first),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Pages in list order, at most `limit`; meaningful while no other thread changes the list.
    pub(super) fn walk(&self, limit: usize) -> Vec<PageId> {
        let mut pages = Vec::new();
        // Pairs with the AcqRel exchanges in `pop` and `push`.
        let (_, mut index) = unpack(self.head.load(Ordering::Acquire));
        while index != self.end() && pages.len() < limit {
            pages.push(index);
            index = self.next(index);
        }
        pages
    }
}

//! The block budget: how many pages of KV the process may promise, in bytes and pages ("block" is the budget's own word
//! for a page).
//!
//! The kernel workspace is taken out first; the rest is divided into pages. Reservations are promises made before pages are
//! acquired, so that a step never finds the pool short. Works from any thread without a lock.

mod reservation;

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::primitive::{AtomicU64, Ordering};
pub use reservation::Reservation;

/// Byte and page accounting of one KV budget.
///
/// # Examples
/// ```
/// let budget = paged_core::BlockBudget::new(1 << 20, 4096, 65536)?;
/// assert_eq!(budget.num_pages(), 15);
/// let reservation = budget.reserve(10)?;
/// assert_eq!(budget.num_available(), 5);
/// drop(reservation);
/// assert_eq!(budget.num_available(), 15);
/// # Ok::<(), paged_core::Error>(())
/// ```
#[derive(Clone)]
pub struct BlockBudget {
    account: Arc<Account>,
}

/// The shared state; reservations keep it alive.
struct Account {
    total_bytes: u64,
    workspace_bytes: u64,
    page_bytes: u64,
    num_pages: u64,
    num_reserved: AtomicU64,
}

impl BlockBudget {
    /// Divides `total_bytes` into the workspace and pages.
    ///
    /// # Errors
    /// `InvalidArgument` if `page_bytes` is 0 or workspace and one page do not fit 64 bits; `BudgetTooSmall`, with the smallest
    /// usable budget, if there is no room for the workspace and one page.
    pub fn new(total_bytes: u64, workspace_bytes: u64, page_bytes: u64) -> Result<Self> {
        if page_bytes == 0 {
            return Err(Error::invalid("page_bytes", "expected 1 or more, got 0"));
        }
        let smallest_usable_bytes = workspace_bytes.checked_add(page_bytes).ok_or_else(|| {
            Error::invalid(
                "workspace_bytes",
                format!("{workspace_bytes} and a page of {page_bytes} bytes exceed 64 bits"),
            )
        })?;
        let num_pages = match total_bytes.checked_sub(workspace_bytes) {
            Some(bytes) if bytes >= page_bytes => bytes / page_bytes,
            _ => {
                return Err(Error::BudgetTooSmall {
                    total_bytes,
                    workspace_bytes,
                    page_bytes,
                    smallest_usable_bytes,
                });
            }
        };
        let account =
            Account { total_bytes, workspace_bytes, page_bytes, num_pages, num_reserved: AtomicU64::new(0) };
        Ok(Self { account: Arc::new(account) })
    }

    /// Promises `num_pages` pages until the reservation is released or dropped.
    ///
    /// # Errors
    /// `BudgetExceeded` if fewer are available; nothing is reserved then.
    pub fn reserve(&self, num_pages: u64) -> Result<Reservation> {
        self.account.take(num_pages)?;
        Ok(Reservation::new(Arc::clone(&self.account), num_pages))
    }

    /// The whole budget in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.account.total_bytes
    }

    /// Bytes set aside for the kernel workspace.
    pub fn workspace_bytes(&self) -> u64 {
        self.account.workspace_bytes
    }

    /// Bytes of one page over all layers.
    pub fn page_bytes(&self) -> u64 {
        self.account.page_bytes
    }

    /// Pages that the budget holds.
    pub fn num_pages(&self) -> u64 {
        self.account.num_pages
    }

    /// Pages promised to live reservations.
    pub fn num_reserved(&self) -> u64 {
        self.account.num_reserved()
    }

    /// Pages not promised.
    pub fn num_available(&self) -> u64 {
        self.account.num_pages - self.account.num_reserved()
    }
}

impl Account {
    fn num_reserved(&self) -> u64 {
        // Pairs with the AcqRel exchange in `take` and the AcqRel subtraction in `give_back`.
        self.num_reserved.load(Ordering::Acquire)
    }

    fn take(&self, num_pages: u64) -> Result<()> {
        let mut reserved = self.num_reserved();
        loop {
            let available = self.num_pages - reserved;
            if num_pages > available {
                return Err(Error::BudgetExceeded { needed: num_pages, available, total: self.num_pages });
            }
            // AcqRel: who reserves pages that another gave back sees what that holder did before.
            match self.num_reserved.compare_exchange(
                reserved,
                reserved + num_pages,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Ok(()),
                Err(now) => reserved = now,
            }
        }
    }

    fn give_back(&self, num_pages: u64) {
        // Pairs with the Acquire loads in `num_reserved` and `take`.
        self.num_reserved.fetch_sub(num_pages, Ordering::AcqRel);
    }
}

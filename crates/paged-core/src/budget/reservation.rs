//! A promise of pages that ends with its owner.

use std::sync::Arc;

use super::Account;

/// Pages reserved in a [`BlockBudget`](super::BlockBudget); dropping it gives them back.
#[must_use = "dropping a reservation gives its pages back"]
pub struct Reservation {
    account: Arc<Account>,
    num_pages: u64,
}

impl Reservation {
    pub(super) fn new(account: Arc<Account>, num_pages: u64) -> Self {
        Self { account, num_pages }
    }

    /// Pages still reserved; 0 after `release`.
    pub fn num_pages(&self) -> u64 {
        self.num_pages
    }

    /// Gives the pages back now. A second call does nothing.
    pub fn release(&mut self) {
        self.account.give_back(std::mem::take(&mut self.num_pages));
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.release();
    }
}

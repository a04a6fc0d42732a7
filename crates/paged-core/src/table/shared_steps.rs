//! A table as a row of a decode batch: its tokens follow the batch's clock.

use std::sync::Arc;

use super::{PageTable, StepClock};
use crate::ids::PageId;
use crate::pool::PagePool;

impl PageTable {
    /// Puts the table on `clock`: from now on it gets a token with each step. Stops the clock that it was on.
    pub(crate) fn join_clock(&mut self, clock: &Arc<StepClock>) {
        self.leave_clock();
        self.own_tokens = self.own_tokens.wrapping_sub(clock.num_steps() as usize);
        self.clock = Some(Arc::clone(clock));
    }

    /// Takes the table off its clock, if it is on one, and stops that one: its batch has to look at its tables.
    pub(crate) fn leave_clock(&mut self) {
        if let Some(clock) = self.clock.take() {
            self.own_tokens = self.own_tokens.wrapping_add(clock.interrupt() as usize);
        }
    }

    /// As `leave_clock` for the batch itself, which takes no step meanwhile and knows what it does: `clock` runs on.
    pub(crate) fn part_from(&mut self, clock: &Arc<StepClock>) {
        if self.is_on(clock) {
            self.own_tokens = self.num_tokens();
            self.clock = None;
        }
    }

    pub(crate) fn is_on(&self, clock: &Arc<StepClock>) -> bool {
        self.clock.as_ref().is_some_and(|mine| Arc::ptr_eq(mine, clock))
    }

    pub(crate) fn is_of(&self, pool: &Arc<PagePool>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    /// Steps until the table needs a page, if nobody shares its last one.
    pub(crate) fn num_steps_left(&self) -> usize {
        self.room(self.num_tokens())
    }

    /// Adds a page that the caller has acquired, for the token of the coming step.
    pub(crate) fn push_page(&mut self, page: PageId) {
        self.pages.push(page);
    }
}

//! The rows of a decode batch: the page tables and the plans of its sequences, which grow by a token together.
//!
//! What a step has to know of the tables is kept flat here: at which step the first row is full, and whether somebody may have
//! got hold of a last page. A steady step then looks at a few words, whatever the batch, and touches no table; the tables are
//! on a clock that it moves on.

use std::ops::DerefMut;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::{PageId, Slot};
use crate::plan::DecodePlan;
use crate::pool::PagePool;
use crate::table::{Append, PageTable, Reserved, StepClock, reserve};

/// What the table of one row took from the pool for the coming token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowGrowth {
    /// KV group.
    pub group: usize,
    /// Row of the group's plan.
    pub row: usize,
    /// Its pages and copies.
    pub append: Append,
}

/// A row's table: KV group and row.
pub type RowPlace = (usize, usize);

/// The rows of one KV group.
struct GroupRows {
    pool: Arc<PagePool>,
    /// `[row]` the step of the clock at which the table needs a page.
    full_at: Vec<u64>,
    /// `[row]`; `None` for a table without pages.
    last_pages: Vec<Option<PageId>>,
    /// The pool's, before the last pages were last seen to have one holder.
    num_shares: u64,
    /// What the plan has to say of itself if nobody else has touched its rows.
    num_row_changes: u64,
    num_advances: u64,
}

/// The rows of a decode batch in every KV group. Rows come and go through it, in each group by itself; other edits of a plan are
/// its owner's.
///
/// The caller keeps the tables, in row order, and lends them when they are to change.
pub struct DecodeRows {
    clock: Arc<StepClock>,
    /// No table needs a page before this step.
    next_full: u64,
    groups: Vec<GroupRows>,
}

impl DecodeRows {
    /// A batch without rows over the plans of all groups and the pools of their tables.
    ///
    /// # Errors
    /// `InvalidArgument` for a plan that has rows.
    pub fn new<'a>(groups: impl IntoIterator<Item = (&'a DecodePlan, Arc<PagePool>)>) -> Result<Self> {
        let empty = |(plan, pool): (&DecodePlan, Arc<PagePool>)| {
            if plan.num_rows() > 0 {
                return Err(Error::invalid("plans", format!("a plan has {} rows already", plan.num_rows())));
            }
            Ok(GroupRows {
                pool,
                full_at: Vec::new(),
                last_pages: Vec::new(),
                num_shares: 0,
                num_row_changes: plan.num_row_changes(),
                num_advances: plan.num_advances(),
            })
        };
        let groups = groups.into_iter().map(empty).collect::<Result<_>>()?;
        Ok(Self { clock: Arc::new(StepClock::new()), next_full: u64::MAX, groups })
    }

    /// Gives a table a row behind the others of its group.
    ///
    /// # Errors
    /// `InvalidArgument` for a table that has a row or is of another pool or page size; `InvalidPlan` if the plan's rows were
    /// changed by another way; as [`DecodePlan::admit`]. Nothing is changed then.
    pub fn admit(&mut self, group: usize, plan: &mut DecodePlan, table: &mut PageTable) -> Result<Slot> {
        let page_size = plan.config().page_size;
        let has_row = table.is_on(&self.clock);
        let rows = self.group(group)?;
        if plan.num_rows() == 0 {
            rows.num_advances = plan.num_advances(); // whatever became of the last step, no row has missed it
        }
        rows.check(plan)?;
        if has_row {
            return Err(Error::invalid("table", "it has a row already"));
        }
        if !table.is_of(&rows.pool) || table.page_size() != page_size {
            return Err(Error::invalid("table", "it is of another pool or page size than its group"));
        }
        table.leave_clock(); // of another batch, whose steps would come in between
        // Every held token is a token of the row; the plan's own window trims those out of view.
        let slot = plan.admit(table.pages(), table.num_held_tokens(), 0, Some(table.num_tokens()))?;
        rows.num_row_changes = plan.num_row_changes();
        table.join_clock(&self.clock);
        let full_at = self.clock.num_steps() + table.num_steps_left() as u64;
        let rows = &mut self.groups[group];
        rows.full_at.push(full_at);
        rows.last_pages.push(table.pages().last().copied());
        // Perhaps the new row's last page is shared: look at all of them in the next step.
        rows.num_shares = rows.pool.num_shares().wrapping_sub(1);
        self.next_full = self.next_full.min(full_at);
        Ok(slot)
    }

    /// Ends a row; those behind it move up. `table` is the row's. Also after a step that its caller did not bring to an end.
    ///
    /// # Errors
    /// `StaleSlot`; `InvalidPlan` if other rows came or went by another way. Nothing is changed then.
    pub fn retire(
        &mut self,
        group: usize,
        plan: &mut DecodePlan,
        slot: Slot,
        table: &mut PageTable,
    ) -> Result<()> {
        let rows = self.group(group)?;
        if plan.num_row_changes() != rows.num_row_changes {
            rows.check(plan)?;
        }
        let row = plan.row_of(slot)?;
        plan.retire(slot)?;
        rows.num_row_changes = plan.num_row_changes();
        rows.full_at.remove(row);
        rows.last_pages.remove(row);
        table.part_from(&self.clock);
        Ok(())
    }

    /// Gives every row a token, in its table and in its plan, if no table takes a page for it: constant time, but for the
    /// plan's own. False, and nothing changed, if one does or if [`advance`](Self::advance) has to find out.
    ///
    /// # Errors
    /// `InvalidPlan` if rows of a plan were changed by another way, or as [`DecodePlan::advance`]. Nothing is changed then.
    pub fn try_advance<P: DerefMut<Target = DecodePlan>>(&mut self, plans: &mut [P]) -> Result<bool> {
        let Some(now) = self.clock.running() else { return Ok(false) };
        if now >= self.next_full && self.find_next_full() <= now {
            return Ok(false);
        }
        for (rows, plan) in self.groups.iter_mut().zip(plans.iter_mut()) {
            let num_shares = rows.pool.num_shares();
            if num_shares != rows.num_shares && !rows.find_unshared(num_shares, now)? {
                return Ok(false);
            }
            rows.check(plan)?;
            plan.check_advance()?;
        }
        if !self.clock.step(now) {
            return Ok(false);
        }
        for (rows, plan) in self.groups.iter_mut().zip(plans.iter_mut()) {
            plan.advance()?;
            rows.num_advances += 1;
        }
        Ok(true)
    }

    /// Gives every row a token in its table, in all groups or in none.
    ///
    /// If no table takes pages for it, the plans are advanced too. Else the result says which do, by group and row, ascending;
    /// the caller tells the plans of these pages and advances all of them.
    ///
    /// `lock` lends tables, in the order asked.
    ///
    /// # Errors
    /// `OutOfPages`; `InvalidArgument` for more than 2^31 - 1 tokens in a row; `Corrupt` if a table's pages were released behind
    /// its back; as [`try_advance`](Self::try_advance), and what `lock` returns. Nothing is changed then.
    pub fn advance<P, T, L>(&mut self, plans: &mut [P], mut lock: L) -> Result<Vec<RowGrowth>>
    where
        P: DerefMut<Target = DecodePlan>,
        T: DerefMut<Target = PageTable>,
        L: FnMut(&[RowPlace]) -> Result<Vec<T>>,
    {
        if self.try_advance(plans)? {
            return Ok(Vec::new());
        }
        for (rows, plan) in self.groups.iter().zip(plans.iter()) {
            rows.check(plan)?;
        }
        if let Some(grown) = self.add_pages(&mut lock)? {
            return Ok(grown);
        }
        self.look_at_all(plans, &mut lock)
    }

    /// The step of rows that are full, while no last page is shared: touches the tables of these rows alone. `None`, and
    /// nothing changed, if there is more to it.
    fn add_pages<T, L>(&mut self, lock: &mut L) -> Result<Option<Vec<RowGrowth>>>
    where
        T: DerefMut<Target = PageTable>,
        L: FnMut(&[RowPlace]) -> Result<Vec<T>>,
    {
        let Some(now) = self.clock.running() else { return Ok(None) };
        let mut places: Vec<RowPlace> = Vec::new();
        for (group, rows) in self.groups.iter_mut().enumerate() {
            let num_shares = rows.pool.num_shares();
            if num_shares != rows.num_shares && !rows.find_unshared(num_shares, now)? {
                return Ok(None);
            }
            let full = rows.full_at.iter().enumerate().filter(|&(_, &step)| step <= now);
            places.extend(full.map(|(row, _)| (group, row)));
        }
        let mut tables = lock(&places)?;
        // A table at the end of what it counts has no room either, and gets its error below.
        let is_plain = |table: &T| table.is_on(&self.clock) && table.pages_needed(1) == Ok(1);
        if places.is_empty() || !tables.iter().all(is_plain) {
            return Ok(None);
        }
        let fresh = self.acquire(&places)?;
        if !self.clock.step(now) {
            self.give_back(&places, &fresh)?;
            return Ok(None);
        }
        let mut grown = Vec::with_capacity(places.len());
        for ((&(group, row), &page), table) in places.iter().zip(&fresh).zip(&mut tables) {
            table.push_page(page);
            let rows = &mut self.groups[group];
            // The step is counted: the token is in the page already.
            rows.full_at[row] = now + 1 + table.num_steps_left() as u64;
            rows.last_pages[row] = Some(page);
            let append = Append { new_pages: vec![page], copies: Vec::new() };
            grown.push(RowGrowth { group, row, append });
        }
        self.expect_advance();
        Ok(Some(grown))
    }

    /// One page for each place, in all groups or in none.
    fn acquire(&self, places: &[RowPlace]) -> Result<Vec<PageId>> {
        let mut fresh = Vec::with_capacity(places.len());
        for (group, rows) in self.groups.iter().enumerate() {
            let num_pages = places.iter().filter(|place| place.0 == group).count();
            match rows.pool.acquire(num_pages) {
                Ok(pages) => fresh.extend(pages),
                Err(error) => {
                    self.give_back(places, &fresh)?;
                    return Err(error);
                }
            }
        }
        Ok(fresh)
    }

    /// Gives the pages of the first places back.
    fn give_back(&self, places: &[RowPlace], pages: &[PageId]) -> Result<()> {
        for (&(group, _), &page) in places.iter().zip(pages) {
            self.groups[group].pool.release(&[page])?;
        }
        Ok(())
    }

    /// The step after which everything known of the tables is known anew: from the tables themselves.
    fn look_at_all<P, T, L>(&mut self, plans: &mut [P], lock: &mut L) -> Result<Vec<RowGrowth>>
    where
        P: DerefMut<Target = DecodePlan>,
        T: DerefMut<Target = PageTable>,
        L: FnMut(&[RowPlace]) -> Result<Vec<T>>,
    {
        let mut places: Vec<RowPlace> = Vec::new();
        for (group, rows) in self.groups.iter().enumerate() {
            places.extend((0..rows.full_at.len()).map(|row| (group, row)));
        }
        let num_shares: Vec<u64> = self.groups.iter().map(|rows| rows.pool.num_shares()).collect();
        let mut tables = lock(&places)?;
        tables.iter_mut().for_each(|table| table.leave_clock());
        let grown = self.append_to_all(plans, &mut tables);

        let now = self.clock.num_steps();
        for (&(group, row), table) in places.iter().zip(&mut tables) {
            table.join_clock(&self.clock);
            let rows = &mut self.groups[group];
            rows.full_at[row] = now + table.num_steps_left() as u64;
            rows.last_pages[row] = table.pages().last().copied();
        }
        // All tables are on the clock again and still held: nobody can have stopped it since.
        self.clock.resume();
        self.find_next_full();
        let grown = grown?;
        for (rows, num_shares) in self.groups.iter_mut().zip(num_shares) {
            rows.num_shares = num_shares;
        }
        if grown.is_empty() {
            plans.iter_mut().try_for_each(|plan| plan.advance())?;
        }
        self.expect_advance();
        Ok(grown)
    }

    fn append_to_all<P, T>(&self, plans: &mut [P], mut tables: &mut [T]) -> Result<Vec<RowGrowth>>
    where
        P: DerefMut<Target = DecodePlan>,
        T: DerefMut<Target = PageTable>,
    {
        let mut parts = Vec::with_capacity(self.groups.len());
        for rows in &self.groups {
            let (mine, others) = tables.split_at_mut(rows.full_at.len());
            parts.push(mine);
            tables = others;
        }
        let reserved = self.reserve_all(&parts)?;
        if reserved.iter().all(|reserved| reserved.fresh.is_empty()) {
            plans.iter_mut().try_for_each(|plan| plan.check_advance())?;
        }
        let mut grown = Vec::new();
        for (group, (reserved, mine)) in reserved.into_iter().zip(parts).enumerate() {
            let changed = reserved.apply(mine, 1);
            grown.extend(changed.into_iter().map(|(row, append)| RowGrowth { group, row, append }));
        }
        Ok(grown)
    }

    /// Acquires every group's pages and lets go of the pages that are to be copied.
    fn reserve_all<T: DerefMut<Target = PageTable>>(&self, parts: &[&mut [T]]) -> Result<Vec<Reserved>> {
        let mut all: Vec<Reserved> = Vec::with_capacity(parts.len());
        let mut num_released = 0;
        let mut failed = None;
        for part in parts {
            match reserve(part, 1) {
                Ok(reserved) => all.push(reserved),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        if failed.is_none() {
            for (rows, reserved) in self.groups.iter().zip(&all) {
                failed = rows.pool.release(&reserved.sources()).err();
                if failed.is_some() {
                    break;
                }
                num_released += 1;
            }
        }
        let Some(error) = failed else { return Ok(all) };
        for (group, (rows, reserved)) in self.groups.iter().zip(&all).enumerate() {
            if group < num_released {
                rows.pool.retain(&reserved.sources())?;
            }
            rows.pool.release(&reserved.fresh)?;
        }
        Err(error)
    }

    /// The plans are as far as the tables, or will be when the caller has edited them.
    fn expect_advance(&mut self) {
        self.groups.iter_mut().for_each(|rows| rows.num_advances += 1);
    }

    /// The bound has been reached: perhaps by a row that is gone or has got a page.
    #[cold]
    fn find_next_full(&mut self) -> u64 {
        let full_at = self.groups.iter().flat_map(|rows| &rows.full_at);
        self.next_full = full_at.copied().min().unwrap_or(u64::MAX);
        self.next_full
    }

    fn group(&mut self, group: usize) -> Result<&mut GroupRows> {
        let num_groups = self.groups.len();
        let range = || Error::invalid("group", format!("expected 0..{num_groups}, got {group}"));
        self.groups.get_mut(group).ok_or_else(range)
    }
}

impl GroupRows {
    /// Whether no last page that a step would write is shared; keeps `num_shares`, which was read before, if so.
    #[cold]
    fn find_unshared(&mut self, num_shares: u64, now: u64) -> Result<bool> {
        for (&page, &full_at) in self.last_pages.iter().zip(&self.full_at) {
            if let Some(page) = page
                && full_at > now
                && self.pool.is_shared(page)?
            {
                return Ok(false);
            }
        }
        self.num_shares = num_shares;
        Ok(true)
    }

    fn check(&self, plan: &DecodePlan) -> Result<()> {
        if plan.num_row_changes() == self.num_row_changes && plan.num_advances() == self.num_advances {
            return Ok(());
        }
        Err(Error::invalid_plan(format!(
            "its rows were admitted, retired or advanced by another way: {} changes of rows and {} steps, expected {} and {}",
            plan.num_row_changes(),
            plan.num_advances(),
            self.num_row_changes,
            self.num_advances
        )))
    }
}

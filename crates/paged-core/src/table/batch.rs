//! Growth of many tables of one pool in one call: a decode step gives every row room for its token, or none.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::{Append, PageTable};
use crate::error::{Error, Result};
use crate::ids::PageId;

/// What one table takes from the pool.
struct Growth {
    index: usize,
    num_new_pages: usize,
    /// The shared last page that is to be copied.
    source: Option<PageId>,
}

/// Fresh pages that these tables of one pool would take for `num_tokens` tokens each, one after the other.
///
/// Less than each would take now if they share a last page: the last of its holders writes it in place.
///
/// # Errors
/// `InvalidArgument` for tables of different pools, or if a sequence would exceed 2^31 - 1 tokens.
pub fn pages_needed_by<T: Deref<Target = PageTable>>(tables: &[T], num_tokens: usize) -> Result<usize> {
    Ok(num_pages(&growths(tables, num_tokens)?))
}

/// Pages that tables are about to get. Whoever does not apply them gives them back.
pub(crate) struct Reserved {
    growths: Vec<Growth>,
    pub(crate) fresh: Vec<PageId>,
}

impl Reserved {
    /// Shared pages that are to be copied: the tables let go of them before they get the copies.
    pub(crate) fn sources(&self) -> Vec<PageId> {
        self.growths.iter().filter_map(|growth| growth.source).collect()
    }

    /// Gives the tables their pages and tokens. The sources are released; the tables are on no clock.
    pub(crate) fn apply<T: DerefMut<Target = PageTable>>(
        self,
        tables: &mut [T],
        num_tokens: usize,
    ) -> Vec<(usize, Append)> {
        let mut fresh = self.fresh.into_iter();
        let mut changed = Vec::with_capacity(self.growths.len());
        for growth in self.growths {
            let table = &mut *tables[growth.index];
            let mut append = Append::default();
            if let Some(source) = growth.source
                && let Some(last) = table.pages.last_mut()
                && let Some(target) = fresh.next()
            {
                *last = target;
                append.copies.push((source, target));
            }
            append.new_pages.extend(fresh.by_ref().take(growth.num_new_pages));
            table.pages.extend_from_slice(&append.new_pages);
            changed.push((growth.index, append));
        }
        for table in tables {
            table.own_tokens += num_tokens;
        }
        changed
    }
}

/// Acquires what `num_tokens` tokens in each of the tables take; the tables stay as they are.
///
/// # Errors
/// As [`pages_needed_by`], and `OutOfPages`.
pub(crate) fn reserve<T: Deref<Target = PageTable>>(tables: &[T], num_tokens: usize) -> Result<Reserved> {
    let growths = growths(tables, num_tokens)?;
    let fresh = match tables.first() {
        Some(first) if !growths.is_empty() => first.pool.acquire(num_pages(&growths))?,
        _ => Vec::new(),
    };
    Ok(Reserved { growths, fresh })
}

fn num_pages(growths: &[Growth]) -> usize {
    growths.iter().map(|growth| growth.num_new_pages + usize::from(growth.source.is_some())).sum()
}

/// The tables that need pages, in order.
fn growths<T: Deref<Target = PageTable>>(tables: &[T], num_tokens: usize) -> Result<Vec<Growth>> {
    let mut growths: Vec<Growth> = Vec::new();
    let Some(first) = tables.first() else { return Ok(growths) };
    for (index, table) in tables.iter().enumerate() {
        if !Arc::ptr_eq(&table.pool, &first.pool) {
            return Err(Error::invalid("tables", format!("table {index} is of another pool than table 0")));
        }
        if table.takes_nothing(num_tokens)? {
            continue;
        }
        let held = table.num_tokens();
        let num_new_pages = table.grown_pages(held, num_tokens)? - table.pages.len();
        let mut source = None;
        if let Some(&last) = table.pages.last()
            && table.writes_shared_page(held, num_tokens)?
        {
            // Tables before this one have let go of the page by its turn.
            let gone = growths.iter().filter(|growth| growth.source == Some(last)).count();
            source = (table.pool.refcount(last)? as usize > gone + 1).then_some(last);
        }
        if num_new_pages > 0 || source.is_some() {
            growths.push(Growth { index, num_new_pages, source });
        }
    }
    Ok(growths)
}

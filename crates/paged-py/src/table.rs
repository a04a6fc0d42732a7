//! `PageTable` for Python.

use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use paged_core::Error;
use pyo3::prelude::*;
use pyo3::types::{PyList, PySequence};

use crate::buffer::{count, optional_count, page_ids, type_name};
use crate::errors::CoreResult;
use crate::pool::PagePool;

/// The pages of one sequence in one KV group.
#[pyclass(frozen, module = "mlxcel_paged._core")]
pub(crate) struct PageTable(pub(crate) Mutex<paged_core::PageTable>);

impl PageTable {
    /// No call holds the lock while it waits for anything. That includes Python: arguments are read before, as reading one may
    /// run whatever it likes.
    pub(crate) fn lock(&self) -> MutexGuard<'_, paged_core::PageTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl PageTable {
    #[new]
    #[pyo3(signature = (pool, page_size, window = None))]
    fn new(
        pool: &PagePool,
        page_size: &Bound<'_, PyAny>,
        window: Option<&Bound<'_, PyAny>>,
    ) -> CoreResult<Self> {
        let (page_size, window) = (count("page_size", page_size)?, optional_count("window", window)?);
        Ok(Self(Mutex::new(paged_core::PageTable::new(Arc::clone(&pool.0), page_size, window)?)))
    }

    #[getter]
    fn num_tokens(&self) -> usize {
        self.lock().num_tokens()
    }

    #[getter]
    fn kv_len(&self) -> usize {
        self.lock().kv_len()
    }

    #[getter]
    fn num_pages(&self) -> usize {
        self.lock().pages().len()
    }

    #[getter]
    fn pages(&self) -> Vec<u32> {
        self.lock().pages().to_vec()
    }

    #[getter]
    fn head_page(&self) -> usize {
        self.lock().head_page()
    }

    #[getter]
    fn num_held_tokens(&self) -> usize {
        self.lock().num_held_tokens()
    }

    #[getter]
    fn first_page_offset(&self) -> usize {
        self.lock().first_page_offset()
    }

    #[getter]
    fn last_page_len(&self) -> usize {
        self.lock().last_page_len()
    }

    #[getter]
    fn page_size(&self) -> usize {
        self.lock().page_size()
    }

    #[getter]
    fn window(&self) -> Option<usize> {
        self.lock().window()
    }

    fn pages_needed(&self, num_tokens: &Bound<'_, PyAny>) -> CoreResult<usize> {
        let num_tokens = count("num_tokens", num_tokens)?;
        Ok(self.lock().pages_needed(num_tokens)?)
    }

    fn append(&self, num_tokens: &Bound<'_, PyAny>) -> CoreResult<Append> {
        let num_tokens = count("num_tokens", num_tokens)?;
        Ok(Append(self.lock().append(num_tokens)?))
    }

    /// `pages_needed` of many tables of one pool.
    #[staticmethod]
    fn pages_needed_by(tables: &Bound<'_, PyAny>, num_tokens: &Bound<'_, PyAny>) -> CoreResult<usize> {
        let (tables, num_tokens) = (table_refs(tables)?, count("num_tokens", num_tokens)?);
        Ok(paged_core::pages_needed_by(&lock_all(&borrow(&tables))?, num_tokens)?)
    }

    fn fork(&self) -> CoreResult<Self> {
        Ok(Self(Mutex::new(self.lock().fork()?)))
    }

    fn adopt(&self, pages: &Bound<'_, PyAny>) -> CoreResult<()> {
        let pages = page_ids("pages", pages)?;
        Ok(self.lock().adopt(&pages)?)
    }

    fn retire_head(&self) -> CoreResult<Vec<u32>> {
        Ok(self.lock().retire_head()?)
    }

    fn release(&self) -> CoreResult<()> {
        Ok(self.lock().release()?)
    }

    fn check_integrity(&self) -> CoreResult<()> {
        Ok(self.lock().check_integrity()?)
    }

    fn __repr__(&self) -> String {
        let table = self.lock();
        format!("PageTable(num_tokens={}, num_pages={})", table.num_tokens(), table.pages().len())
    }
}

fn table_refs<'py>(tables: &Bound<'py, PyAny>) -> CoreResult<Vec<Bound<'py, PageTable>>> {
    let wrong =
        |found| Error::invalid_type("tables", format!("expected a sequence of PageTable, got {found}"));
    let list = match tables.cast::<PyList>() {
        Ok(list) => list.clone(),
        Err(_) => {
            let sequence = tables.cast::<PySequence>().map_err(|_| wrong(type_name(tables)))?;
            sequence.to_list().map_err(|_| wrong(type_name(tables)))?
        }
    };
    let mut refs = Vec::with_capacity(list.len());
    for item in list.iter() {
        refs.push(item.cast_into::<PageTable>().map_err(|error| wrong(type_name(&error.into_inner())))?);
    }
    Ok(refs)
}

fn borrow<'a>(tables: &'a [Bound<'_, PageTable>]) -> Vec<&'a PageTable> {
    tables.iter().map(|table| table.get()).collect()
}

/// Locks every table; guards in the order given.
///
/// In any order as long as none is taken, as no call holds a lock for long; else by address, so that two batches never wait
/// for each other.
pub(crate) fn lock_all<'a>(
    tables: &[&'a PageTable],
) -> Result<Vec<MutexGuard<'a, paged_core::PageTable>>, Error> {
    let mut guards = Vec::with_capacity(tables.len());
    for table in tables {
        match table.0.try_lock() {
            Ok(guard) => guards.push(guard),
            Err(TryLockError::Poisoned(poisoned)) => guards.push(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                drop(guards);
                return lock_by_address(tables);
            }
        }
    }
    Ok(guards)
}

fn lock_by_address<'a>(
    tables: &[&'a PageTable],
) -> Result<Vec<MutexGuard<'a, paged_core::PageTable>>, Error> {
    let mut order: Vec<(*const PageTable, usize)> =
        tables.iter().enumerate().map(|(index, table)| (ptr::from_ref(*table), index)).collect();
    order.sort_unstable();
    if let Some(pair) = order.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let (first, second) = (pair[0].1, pair[1].1);
        return Err(Error::invalid("tables", format!("tables {first} and {second} are the same")));
    }
    let mut guards: Vec<(usize, MutexGuard<'a, paged_core::PageTable>)> =
        order.into_iter().map(|(_, index)| (index, tables[index].lock())).collect();
    guards.sort_unstable_by_key(|&(index, _)| index);
    Ok(guards.into_iter().map(|(_, guard)| guard).collect())
}

/// What an append took from the pool.
#[pyclass(frozen, module = "mlxcel_paged._core")]
pub(crate) struct Append(pub(crate) paged_core::Append);

#[pymethods]
impl Append {
    #[getter]
    fn new_pages(&self) -> Vec<u32> {
        self.0.new_pages.clone()
    }

    #[getter]
    fn copies(&self) -> Vec<(u32, u32)> {
        self.0.copies.clone()
    }

    fn __repr__(&self) -> String {
        format!("Append(new_pages={:?}, copies={:?})", self.0.new_pages, self.0.copies)
    }
}

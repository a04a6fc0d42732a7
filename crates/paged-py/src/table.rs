//! `PageTable` for Python.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

use crate::buffer::{count, optional_count, page_ids};
use crate::errors::CoreResult;
use crate::pool::PagePool;

/// The pages of one sequence in one KV group.
#[pyclass(frozen, module = "mlxcel_paged._core")]
pub(crate) struct PageTable(Mutex<paged_core::PageTable>);

impl PageTable {
    /// No call holds the lock while it waits for anything.
    fn lock(&self) -> MutexGuard<'_, paged_core::PageTable> {
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
        Ok(self.lock().pages_needed(count("num_tokens", num_tokens)?)?)
    }

    fn append(&self, num_tokens: &Bound<'_, PyAny>) -> CoreResult<Append> {
        Ok(Append(self.lock().append(count("num_tokens", num_tokens)?)?))
    }

    fn fork(&self) -> CoreResult<Self> {
        Ok(Self(Mutex::new(self.lock().fork()?)))
    }

    fn adopt(&self, pages: &Bound<'_, PyAny>) -> CoreResult<()> {
        Ok(self.lock().adopt(&page_ids("pages", pages)?)?)
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

/// What an append took from the pool.
#[pyclass(frozen, module = "mlxcel_paged._core")]
pub(crate) struct Append(paged_core::Append);

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

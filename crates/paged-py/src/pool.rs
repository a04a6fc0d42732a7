//! `PagePool` for Python.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::buffer::{count, page_ids};
use crate::errors::CoreResult;

/// A fixed number of pages with lock-free acquire, retain and release.
#[pyclass(frozen, module = "mlxcel_paged._core")]
pub(crate) struct PagePool(pub(crate) Arc<paged_core::PagePool>);

#[pymethods]
impl PagePool {
    #[new]
    fn new(num_pages: &Bound<'_, PyAny>) -> CoreResult<Self> {
        Ok(Self(Arc::new(paged_core::PagePool::new(count("num_pages", num_pages)?)?)))
    }

    #[getter]
    fn num_pages(&self) -> usize {
        self.0.num_pages()
    }

    #[getter]
    fn num_free(&self) -> usize {
        self.0.num_free()
    }

    #[getter]
    fn num_used(&self) -> usize {
        self.0.num_used()
    }

    fn acquire(&self, num_pages: &Bound<'_, PyAny>) -> CoreResult<Vec<u32>> {
        Ok(self.0.acquire(count("num_pages", num_pages)?)?)
    }

    fn retain(&self, pages: &Bound<'_, PyAny>) -> CoreResult<()> {
        Ok(self.0.retain(&page_ids("pages", pages)?)?)
    }

    fn release(&self, pages: &Bound<'_, PyAny>) -> CoreResult<()> {
        Ok(self.0.release(&page_ids("pages", pages)?)?)
    }

    fn refcount(&self, page: &Bound<'_, PyAny>) -> CoreResult<u32> {
        Ok(self.0.refcount(page_id(page)?)?)
    }

    fn is_shared(&self, page: &Bound<'_, PyAny>) -> CoreResult<bool> {
        Ok(self.0.is_shared(page_id(page)?)?)
    }

    fn check_integrity(&self, py: Python<'_>) -> CoreResult<()> {
        Ok(py.detach(|| self.0.check_integrity())?)
    }

    fn __repr__(&self) -> String {
        format!("PagePool(num_pages={}, num_free={})", self.num_pages(), self.num_free())
    }
}

/// Reads one page id; an id beyond any pool becomes one that no pool holds.
pub(crate) fn page_id(page: &Bound<'_, PyAny>) -> CoreResult<u32> {
    Ok(u32::try_from(count("page", page)?).unwrap_or(u32::MAX))
}

//! `BlockBudget` and `Reservation` for Python.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::buffer::count;
use crate::errors::CoreResult;

/// Byte and page accounting of one KV budget, lock-free.
#[pyclass(frozen, module = "mlxcel_paged._core")]
pub(crate) struct BlockBudget(paged_core::BlockBudget);

#[pymethods]
impl BlockBudget {
    #[new]
    #[pyo3(signature = (total_bytes, *, workspace_bytes, page_bytes))]
    fn new(
        total_bytes: &Bound<'_, PyAny>,
        workspace_bytes: &Bound<'_, PyAny>,
        page_bytes: &Bound<'_, PyAny>,
    ) -> CoreResult<Self> {
        Ok(Self(paged_core::BlockBudget::new(
            count("total_bytes", total_bytes)? as u64,
            count("workspace_bytes", workspace_bytes)? as u64,
            count("page_bytes", page_bytes)? as u64,
        )?))
    }

    #[getter]
    fn num_pages(&self) -> u64 {
        self.0.num_pages()
    }

    #[getter]
    fn num_reserved(&self) -> u64 {
        self.0.num_reserved()
    }

    #[getter]
    fn num_available(&self) -> u64 {
        self.0.num_available()
    }

    #[getter]
    fn total_bytes(&self) -> u64 {
        self.0.total_bytes()
    }

    #[getter]
    fn workspace_bytes(&self) -> u64 {
        self.0.workspace_bytes()
    }

    #[getter]
    fn page_bytes(&self) -> u64 {
        self.0.page_bytes()
    }

    fn reserve(&self, num_pages: &Bound<'_, PyAny>) -> CoreResult<Reservation> {
        let reservation = self.0.reserve(count("num_pages", num_pages)? as u64)?;
        Ok(Reservation(Mutex::new(reservation)))
    }

    fn __repr__(&self) -> String {
        format!("BlockBudget(num_pages={}, num_available={})", self.num_pages(), self.num_available())
    }
}

/// Pages reserved in a budget until `release`, the end of a `with` block, or garbage collection.
#[pyclass(frozen, module = "mlxcel_paged._core")]
pub(crate) struct Reservation(Mutex<paged_core::Reservation>);

#[pymethods]
impl Reservation {
    #[getter]
    fn num_pages(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).num_pages()
    }

    fn release(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).release();
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyAny>) {
        self.release();
    }

    fn __repr__(&self) -> String {
        format!("Reservation(num_pages={})", self.num_pages())
    }
}

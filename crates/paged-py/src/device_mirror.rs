//! `DeviceMirror` for Python.

use std::sync::{Mutex, MutexGuard, PoisonError};

use paged_core::plan::{self, DeviceLayout};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyTuple;

use crate::buffer::count;
use crate::errors::{CoreError, CoreResult};
use crate::plan::DecodePlan;
use crate::plan_config::Argument;

/// The device's copy of one decode plan: what has to be written there before each step.
#[pyclass(frozen, module = "mlxcel_paged._core")]
pub(crate) struct DeviceMirror {
    plan: Py<DecodePlan>,
    mirror: Mutex<plan::DeviceMirror>,
    layout: DeviceLayout,
    num_workers: usize,
    max_partial_rows: usize,
}

impl DeviceMirror {
    fn lock(&self, py: Python<'_>) -> MutexGuard<'_, plan::DeviceMirror> {
        self.mirror.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl DeviceMirror {
    #[new]
    #[pyo3(signature = (plan, num_workers))]
    fn new(plan: &Bound<'_, DecodePlan>, num_workers: Argument<'_, '_>) -> CoreResult<Self> {
        let num_workers = count("num_workers", num_workers)?;
        let locked = plan.get().lock(plan.py());
        let mirror = plan::DeviceMirror::new(&locked, num_workers)?;
        let max_partial_rows = plan::DeviceMirror::max_partial_rows(&locked, num_workers);
        drop(locked);
        let layout = *mirror.layout();
        Ok(Self {
            plan: plan.clone().unbind(),
            mirror: Mutex::new(mirror),
            layout,
            num_workers,
            max_partial_rows,
        })
    }

    fn try_sync(&self, py: Python<'_>) -> bool {
        let plan = self.plan.get().lock(py);
        self.lock(py).try_sync(&plan)
    }

    fn sync<'py>(&self, num_rows: Argument<'_, 'py>) -> PyResult<Bound<'py, PyTuple>> {
        let py = num_rows.py();
        let num_rows = count("num_rows", num_rows)?;
        let mut words = Vec::new();
        let plan = self.plan.get().lock(py);
        self.lock(py).sync(&plan, num_rows, &mut words).map_err(CoreError::from)?;
        drop(plan);
        if words.is_empty() {
            return Ok(PyTuple::empty(py));
        }
        let flat: Vec<i32> = words.into_iter().flat_map(|(address, value)| [address, value]).collect();
        PyTuple::new(py, flat)
    }

    #[getter]
    fn num_lists(&self, py: Python<'_>) -> u64 {
        self.lock(py).num_lists()
    }

    #[getter]
    fn num_workers(&self) -> usize {
        self.num_workers
    }

    #[getter]
    fn max_partial_rows(&self) -> usize {
        self.max_partial_rows
    }

    #[getter]
    fn num_slots(&self) -> usize {
        self.layout.num_slots
    }

    #[getter]
    fn null_slot(&self) -> usize {
        self.layout.null_slot()
    }

    #[getter]
    fn row_stride(&self) -> usize {
        self.layout.row_stride
    }

    #[getter]
    fn row_slots_begin(&self) -> usize {
        self.layout.row_slots_begin
    }

    #[getter]
    fn work_items_begin(&self) -> usize {
        self.layout.work_items_begin
    }

    #[getter]
    fn num_items(&self) -> usize {
        self.layout.num_items
    }

    #[getter]
    fn num_state_words(&self) -> usize {
        self.layout.num_state_words()
    }

    #[getter]
    fn num_table_words(&self) -> usize {
        self.layout.num_table_words
    }
}

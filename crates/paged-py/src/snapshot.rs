//! Copies of a plan's state for Python: compact CSR, snapshots and the CUDA form of the work list.

use paged_core::plan::{StreamItem, WorkItem};
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::buffer::Int32Array;
use crate::slot::Slot;

type View = Py<PyMemoryView>;

/// Compact CSR arrays of a batch in row order, read-only int32.
#[pyclass(frozen, get_all, module = "mlxcel_paged._core")]
pub(crate) struct Csr {
    indptr: View,
    indices: View,
    last_page_len: View,
    first_page_offset: View,
    lengths: View,
    positions: View,
}

impl Csr {
    pub(crate) fn new(py: Python<'_>, csr: paged_core::plan::Csr) -> PyResult<Self> {
        let view = |values| Ok::<_, PyErr>(Int32Array::owned(py, values, None)?.unbind());
        Ok(Self {
            indptr: view(csr.indptr)?,
            indices: view(csr.indices)?,
            last_page_len: view(csr.last_page_len)?,
            first_page_offset: view(csr.first_page_offset)?,
            lengths: view(csr.lengths)?,
            positions: view(csr.positions)?,
        })
    }
}

/// A consistent copy of a plan's state.
#[pyclass(frozen, get_all, module = "mlxcel_paged._core")]
pub(crate) struct PlanSnapshot {
    epoch: u64,
    slots: Vec<Slot>,
    csr: Py<Csr>,
    work_items: View,
    is_work_current: bool,
}

impl PlanSnapshot {
    pub(crate) fn new(py: Python<'_>, snapshot: paged_core::plan::PlanSnapshot) -> PyResult<Self> {
        let fields = |item: &WorkItem| [item.slot, item.kv_begin, item.kv_end, item.out_row, item.flags];
        let items = snapshot.work_items.iter().flat_map(fields).collect();
        Ok(Self {
            epoch: snapshot.epoch,
            slots: snapshot.slots.into_iter().map(Slot).collect(),
            csr: Py::new(py, Csr::new(py, snapshot.csr)?)?,
            work_items: Int32Array::owned(py, items, Some(WorkItem::NUM_FIELDS))?.unbind(),
            is_work_current: snapshot.is_work_current,
        })
    }
}

/// The work list in the CUDA kernel's form.
#[pyclass(frozen, get_all, module = "mlxcel_paged._core")]
pub(crate) struct StreamList {
    items: View,
    num_workers: usize,
    num_partial_rows: usize,
    num_steps: usize,
}

impl StreamList {
    pub(crate) fn new(py: Python<'_>, list: &paged_core::plan::StreamList) -> PyResult<Self> {
        let fields = list.items.iter().flat_map(StreamItem::fields).collect();
        Ok(Self {
            items: Int32Array::owned(py, fields, Some(StreamItem::NUM_FIELDS))?.unbind(),
            num_workers: list.num_workers,
            num_partial_rows: list.num_partial_rows,
            num_steps: list.num_steps,
        })
    }
}

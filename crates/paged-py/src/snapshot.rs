//! Copies of a plan's state for Python: compact CSR and snapshots.

use paged_core::plan::WorkItem;
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

//! `DecodePlan` for Python.
//!
//! The plan sits in a mutex, so that two Python threads that edit it by mistake take turns. Readers on other threads
//! (`epoch`, `num_rows`, `snapshot` and the array views) go past it through the plan's own lock-free reader.

use std::sync::{Mutex, MutexGuard, PoisonError};

use paged_core::plan::{self, CsrView, MergeRow, PlanArray, PlanConfig, PlanReader, WorkItem};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyMemoryView, PyTuple};

use crate::buffer::{Int32Array, count, int32_array, optional_count, page_ids};
use crate::errors::{CoreError, CoreResult};
use crate::plan_config::{Argument, Optional, heads, set_options};
use crate::pool::page_id;
use crate::slot::Slot;
use crate::snapshot::{Csr, PlanSnapshot, StreamList};

/// The plan of one KV group's decode batch: row table and balanced work list.
#[pyclass(frozen, module = "mlxcel_paged._core")]
pub(crate) struct DecodePlan {
    plan: Mutex<plan::DecodePlan>,
    reader: PlanReader,
    config: PlanConfig,
    num_work_items: usize,
}

impl DecodePlan {
    fn wrap(plan: plan::DecodePlan) -> Self {
        Self {
            reader: plan.reader(),
            config: plan.config().clone(),
            num_work_items: plan.num_work_items(),
            plan: Mutex::new(plan),
        }
    }

    /// Waits, detached from the interpreter, for a kernel that is still reading.
    pub(crate) fn lock(&self, py: Python<'_>) -> MutexGuard<'_, plan::DecodePlan> {
        self.plan.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `task`, detached from the interpreter, on the plan with its work list up to date. The plan does not change
    /// meanwhile.
    pub(crate) fn run<T: Send>(&self, py: Python<'_>, task: impl FnOnce(&plan::DecodePlan) -> T + Send) -> T {
        py.detach(|| {
            let mut plan = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
            plan.ensure_work_list();
            task(&plan)
        })
    }

    fn array<'py>(
        &self,
        py: Python<'py>,
        array: PlanArray,
        columns: Option<usize>,
    ) -> PyResult<Bound<'py, PyMemoryView>> {
        Int32Array::resident(py, self.reader.clone(), array, columns)
    }
}

#[pymethods]
impl DecodePlan {
    #[new]
    #[pyo3(signature = (*, max_slots, max_pages_per_slot, num_pages, page_size, num_qo_heads, num_kv_heads, head_dim,
        window = None, num_work_items = None, num_workers = None, waves = None, num_splits = None, batch_invariant = false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn new(
        max_slots: Argument<'_, '_>,
        max_pages_per_slot: Argument<'_, '_>,
        num_pages: Argument<'_, '_>,
        page_size: Argument<'_, '_>,
        num_qo_heads: Argument<'_, '_>,
        num_kv_heads: Argument<'_, '_>,
        head_dim: Argument<'_, '_>,
        window: Optional<'_, '_>,
        num_work_items: Optional<'_, '_>,
        num_workers: Optional<'_, '_>,
        waves: Optional<'_, '_>,
        num_splits: Optional<'_, '_>,
        batch_invariant: bool,
    ) -> CoreResult<Self> {
        let mut config = PlanConfig::new(
            count("max_slots", max_slots)?,
            count("max_pages_per_slot", max_pages_per_slot)?,
            count("num_pages", num_pages)?,
            count("page_size", page_size)?,
            heads(num_qo_heads, num_kv_heads, head_dim)?,
        );
        set_options(&mut config, window, num_work_items, num_workers, waves, num_splits, batch_invariant)?;
        Ok(Self::wrap(plan::DecodePlan::new(config)?))
    }

    #[staticmethod]
    #[pyo3(signature = (indptr, indices, last_page_len, first_page_offset = None, *, num_pages, page_size, num_qo_heads,
        num_kv_heads, head_dim, window = None, max_pages_per_slot = None, num_work_items = None, num_workers = None,
        waves = None, num_splits = None, batch_invariant = false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn from_csr(
        py: Python<'_>,
        indptr: Argument<'_, '_>,
        indices: Argument<'_, '_>,
        last_page_len: Argument<'_, '_>,
        first_page_offset: Optional<'_, '_>,
        num_pages: Argument<'_, '_>,
        page_size: Argument<'_, '_>,
        num_qo_heads: Argument<'_, '_>,
        num_kv_heads: Argument<'_, '_>,
        head_dim: Argument<'_, '_>,
        window: Optional<'_, '_>,
        max_pages_per_slot: Optional<'_, '_>,
        num_work_items: Optional<'_, '_>,
        num_workers: Optional<'_, '_>,
        waves: Optional<'_, '_>,
        num_splits: Optional<'_, '_>,
        batch_invariant: bool,
    ) -> CoreResult<Self> {
        let indptr = int32_array("indptr", indptr)?;
        let indices = int32_array("indices", indices)?;
        let last_page_len = int32_array("last_page_len", last_page_len)?;
        let first_page_offset =
            first_page_offset.map(|offsets| int32_array("first_page_offset", offsets)).transpose()?;
        let csr = CsrView {
            indptr: &indptr,
            indices: &indices,
            last_page_len: &last_page_len,
            first_page_offset: first_page_offset.as_deref(),
        };
        let (num_pages, page_size) = (count("num_pages", num_pages)?, count("page_size", page_size)?);
        let heads = heads(num_qo_heads, num_kv_heads, head_dim)?;
        let mut config = plan::import_config(&csr, num_pages, page_size, heads);
        if let Some(max_pages) = optional_count("max_pages_per_slot", max_pages_per_slot)? {
            config.max_pages_per_slot = max_pages;
        }
        set_options(&mut config, window, num_work_items, num_workers, waves, num_splits, batch_invariant)?;
        Ok(Self::wrap(py.detach(|| plan::DecodePlan::from_csr(csr, config))?))
    }

    #[pyo3(signature = (pages, num_tokens, first_page_offset = None, position = None))]
    fn admit(
        &self,
        pages: Argument<'_, '_>,
        num_tokens: Argument<'_, '_>,
        first_page_offset: Optional<'_, '_>,
        position: Optional<'_, '_>,
    ) -> CoreResult<Slot> {
        let pages_read = page_ids("pages", pages)?;
        let num_tokens = count("num_tokens", num_tokens)?;
        let offset = optional_count("first_page_offset", first_page_offset)?.unwrap_or(0);
        let position = optional_count("position", position)?;
        Ok(Slot(self.lock(pages.py()).admit(&pages_read, num_tokens, offset, position)?))
    }

    fn retire(&self, py: Python<'_>, slot: Slot) -> CoreResult<()> {
        Ok(self.lock(py).retire(slot.0)?)
    }

    fn append_page(&self, slot: Slot, page: Argument<'_, '_>) -> CoreResult<()> {
        let id = page_id(page)?;
        Ok(self.lock(page.py()).append_page(slot.0, id)?)
    }

    fn replace_page(
        &self,
        slot: Slot,
        page_index: Argument<'_, '_>,
        page: Argument<'_, '_>,
    ) -> CoreResult<()> {
        let (index, id) = (count("page_index", page_index)?, page_id(page)?);
        Ok(self.lock(page.py()).replace_page(slot.0, index, id)?)
    }

    #[pyo3(signature = (slot, num_pages, first_page_offset = None))]
    fn retire_head_pages(
        &self,
        slot: Slot,
        num_pages: Argument<'_, '_>,
        first_page_offset: Optional<'_, '_>,
    ) -> CoreResult<()> {
        let offset = optional_count("first_page_offset", first_page_offset)?.unwrap_or(0);
        let pages = count("num_pages", num_pages)?;
        Ok(self.lock(num_pages.py()).retire_head_pages(slot.0, pages, offset)?)
    }

    fn advance(&self, py: Python<'_>) -> CoreResult<()> {
        Ok(self.lock(py).advance()?)
    }

    fn rows_needing_page(&self, py: Python<'_>) -> Vec<Slot> {
        self.lock(py).rows_needing_page().into_iter().map(Slot).collect()
    }

    fn row_of(&self, py: Python<'_>, slot: Slot) -> CoreResult<usize> {
        Ok(self.lock(py).row_of(slot.0)?)
    }

    fn slot_of(&self, row: Argument<'_, '_>) -> CoreResult<Slot> {
        let index = count("row", row)?;
        Ok(Slot(self.lock(row.py()).slot_of(index)?))
    }

    fn ensure_work_list(&self, py: Python<'_>) -> bool {
        self.lock(py).ensure_work_list()
    }

    fn validate(&self, py: Python<'_>) -> CoreResult<()> {
        let plan = self.lock(py);
        Ok(plan.validate()?)
    }

    fn export_csr(&self, py: Python<'_>) -> PyResult<Csr> {
        let csr = self.lock(py).export_csr();
        Csr::new(py, csr)
    }

    #[pyo3(signature = (num_workers, num_items = None))]
    fn stream_items(
        &self,
        num_workers: Argument<'_, '_>,
        num_items: Optional<'_, '_>,
    ) -> PyResult<StreamList> {
        let py = num_workers.py();
        let (num_workers, num_items) =
            (count("num_workers", num_workers)?, optional_count("num_items", num_items)?);
        let list = self.lock(py).stream_items(num_workers, num_items).map_err(CoreError::from)?;
        StreamList::new(py, &list)
    }

    fn snapshot(&self, py: Python<'_>) -> PyResult<PlanSnapshot> {
        let snapshot = py.detach(|| self.reader.snapshot());
        PlanSnapshot::new(py, snapshot)
    }

    fn identity<'py>(&self, py: Python<'py>) -> PyResult<(u64, Bound<'py, PyTuple>)> {
        let (epoch, slots) = self.lock(py).identity();
        Ok((epoch, PyTuple::new(py, slots.into_iter().map(Slot))?))
    }

    #[getter]
    fn epoch(&self) -> u64 {
        self.reader.epoch()
    }

    #[getter]
    fn num_rows(&self) -> usize {
        self.reader.num_rows()
    }

    #[getter]
    fn row_start<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.array(py, PlanArray::RowStart, None)
    }

    #[getter]
    fn row_num_pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.array(py, PlanArray::RowNumPages, None)
    }

    #[getter]
    fn page_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.array(py, PlanArray::PageIds, None)
    }

    #[getter]
    fn lengths<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.array(py, PlanArray::Lengths, None)
    }

    #[getter]
    fn first_page_offsets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.array(py, PlanArray::FirstPageOffsets, None)
    }

    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.array(py, PlanArray::Positions, None)
    }

    #[getter]
    fn row_slots<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.array(py, PlanArray::RowSlots, None)
    }

    #[getter]
    fn work_items<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.array(py, PlanArray::WorkItems, Some(WorkItem::NUM_FIELDS))
    }

    #[getter]
    fn merge_rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.array(py, PlanArray::MergeRows, Some(MergeRow::NUM_FIELDS))
    }

    #[getter]
    fn max_slots(&self) -> usize {
        self.config.max_slots
    }

    #[getter]
    fn max_pages_per_slot(&self) -> usize {
        self.config.max_pages_per_slot
    }

    #[getter]
    fn num_pages(&self) -> usize {
        self.config.num_pages
    }

    #[getter]
    fn page_size(&self) -> usize {
        self.config.page_size
    }

    #[getter]
    fn num_qo_heads(&self) -> usize {
        self.config.heads.num_qo_heads
    }

    #[getter]
    fn num_kv_heads(&self) -> usize {
        self.config.heads.num_kv_heads
    }

    #[getter]
    fn head_dim(&self) -> usize {
        self.config.heads.head_dim
    }

    #[getter]
    fn window(&self) -> Option<usize> {
        self.config.window
    }

    #[getter]
    fn num_work_items(&self) -> usize {
        self.num_work_items
    }

    #[getter]
    fn num_splits(&self) -> Option<usize> {
        self.config.num_splits
    }

    #[getter]
    fn batch_invariant(&self) -> bool {
        self.config.batch_invariant
    }

    fn __repr__(&self) -> String {
        format!(
            "DecodePlan(num_rows={}, epoch={}, page_size={})",
            self.num_rows(),
            self.epoch(),
            self.page_size()
        )
    }
}

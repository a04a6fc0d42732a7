//! `DecodeRows` for Python.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paged_core::{Error, plan};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::buffer::count;
use crate::errors::CoreResult;
use crate::plan::DecodePlan;
use crate::plan_config::Argument;
use crate::pool::PagePool;
use crate::slot::Slot;
use crate::table::{Append, PageTable, lock_all};

/// The rows of a decode batch in every KV group: page tables and plans that grow by a token together.
#[pyclass(frozen, module = "mlxcel_paged._core")]
pub(crate) struct DecodeRows {
    /// Locked after `batch` and before any table, in this order.
    plans: Vec<Py<DecodePlan>>,
    batch: Mutex<Batch>,
}

struct Batch {
    rows: paged_core::DecodeRows,
    /// `[group][row]`
    tables: Vec<Vec<Py<PageTable>>>,
}

impl DecodeRows {
    fn lock(&self, py: Python<'_>) -> MutexGuard<'_, Batch> {
        self.batch.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_plans(&self, py: Python<'_>) -> Vec<MutexGuard<'_, plan::DecodePlan>> {
        self.plans.iter().map(|plan| plan.get().lock(py)).collect()
    }

    fn plan(&self, group: usize) -> Result<&DecodePlan, Error> {
        let num_groups = self.plans.len();
        let outside = || Error::invalid("group", format!("expected 0..{num_groups}, got {group}"));
        Ok(self.plans.get(group).ok_or_else(outside)?.get())
    }
}

#[pymethods]
impl DecodeRows {
    #[new]
    #[pyo3(signature = (plans, pools))]
    fn new(plans: Vec<Py<DecodePlan>>, pools: Vec<Py<PagePool>>, py: Python<'_>) -> CoreResult<Self> {
        if plans.len() != pools.len() {
            let message = format!("expected one for each of {} plans, got {}", plans.len(), pools.len());
            return Err(Error::invalid("pools", message).into());
        }
        if plans.iter().enumerate().any(|(index, plan)| plans[..index].iter().any(|other| other.is(plan))) {
            return Err(Error::invalid("plans", "one of them comes twice").into());
        }
        let mut groups = Vec::with_capacity(plans.len());
        let locked: Vec<_> = plans.iter().map(|plan| plan.get().lock(py)).collect();
        for (plan, pool) in locked.iter().zip(&pools) {
            groups.push((&**plan, Arc::clone(&pool.get().0)));
        }
        let rows = paged_core::DecodeRows::new(groups)?;
        drop(locked);
        let tables = plans.iter().map(|_| Vec::new()).collect();
        Ok(Self { plans, batch: Mutex::new(Batch { rows, tables }) })
    }

    fn admit(&self, group: Argument<'_, '_>, table: &Bound<'_, PageTable>) -> CoreResult<Slot> {
        let py = table.py();
        let group = count("group", group)?;
        let mut batch = self.lock(py);
        let mut plan = self.plan(group)?.lock(py);
        let slot = batch.rows.admit(group, &mut plan, &mut table.get().lock())?;
        batch.tables[group].push(table.clone().unbind());
        Ok(Slot(slot))
    }

    fn retire(&self, group: Argument<'_, '_>, slot: Slot) -> CoreResult<()> {
        let py = group.py();
        let group = count("group", group)?;
        let mut batch = self.lock(py);
        let mut plan = self.plan(group)?.lock(py);
        let row = plan.row_of(slot.0)?;
        let Batch { rows, tables } = &mut *batch;
        let Some(table) = tables[group].get(row) else {
            return Err(Error::invalid_plan(format!("row {row} was admitted by another way")).into());
        };
        rows.retire(group, &mut plan, slot.0, &mut table.get().lock())?;
        tables[group].remove(row);
        Ok(())
    }

    fn try_advance(&self, py: Python<'_>) -> CoreResult<bool> {
        let mut batch = self.lock(py);
        let advanced = match self.plans.as_slice() {
            [plan] => batch.rows.try_advance(&mut [plan.get().lock(py)]),
            _ => batch.rows.try_advance(&mut self.lock_plans(py)),
        };
        Ok(advanced?)
    }

    fn advance(&self, py: Python<'_>) -> CoreResult<Vec<(usize, usize, Append)>> {
        let mut batch = self.lock(py);
        let Batch { rows, tables } = &mut *batch;
        let grown = rows.advance(&mut self.lock_plans(py), |places| {
            let wanted: Vec<&PageTable> =
                places.iter().map(|&(group, row)| tables[group][row].get()).collect();
            lock_all(&wanted)
        })?;
        Ok(grown.into_iter().map(|growth| (growth.group, growth.row, Append(growth.append))).collect())
    }
}

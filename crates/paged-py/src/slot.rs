//! A slot of a plan, as a small immutable value.

use pyo3::prelude::*;

use crate::buffer::count;
use crate::errors::{CoreError, CoreResult};
use crate::plan_config::Argument;

/// A row of a plan's table, given to one sequence from `admit` to `retire`.
#[pyclass(frozen, eq, hash, module = "mlxcel_paged._core")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Slot(pub(crate) paged_core::Slot);

#[pymethods]
impl Slot {
    #[new]
    fn new(index: Argument<'_, '_>, generation: Argument<'_, '_>) -> CoreResult<Self> {
        let number = |argument, value| {
            let number = count(argument, value)?;
            u32::try_from(number).map_err(|_| {
                CoreError(paged_core::Error::invalid(argument, format!("{number}, expected less than 2^32")))
            })
        };
        Ok(Self(paged_core::Slot {
            index: number("index", index)?,
            generation: number("generation", generation)?,
        }))
    }

    #[getter]
    fn index(&self) -> u32 {
        self.0.index
    }

    #[getter]
    fn generation(&self) -> u32 {
        self.0.generation
    }

    fn __repr__(&self) -> String {
        format!("Slot(index={}, generation={})", self.0.index, self.0.generation)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Slot {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match value.cast::<Slot>() {
            Ok(slot) => Ok(*slot.get()),
            Err(_) => {
                let found = value.get_type().name()?;
                Err(CoreError(paged_core::Error::invalid_type(
                    "slot",
                    format!("expected a Slot, got {found}"),
                ))
                .into())
            }
        }
    }
}

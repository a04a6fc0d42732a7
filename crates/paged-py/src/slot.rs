//! A slot of a plan, as a small immutable value.

use pyo3::prelude::*;

use crate::errors::CoreError;

/// A row of a plan's table, given to one sequence from `admit` to `retire`.
#[pyclass(frozen, eq, hash, module = "mlxcel_paged._core")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Slot(pub(crate) paged_core::Slot);

#[pymethods]
impl Slot {
    #[new]
    fn new(index: u32, generation: u32) -> Self {
        Self(paged_core::Slot { index, generation })
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

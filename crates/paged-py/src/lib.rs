//! `mlxcel_paged._core`: wiring only. Each submodule wraps one part of `paged-core`.

use pyo3::prelude::*;

/// The compiled core of mlxcel-paged.
#[pymodule(gil_used = false)]
mod _core {
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

//! `mlxcel_paged._core`: wiring only. Each submodule wraps one part of `paged-core`.

mod array;
mod attention;
mod bench_plan;
mod bench_projection;
mod blas;
mod budget;
mod buffer;
mod device_mirror;
mod errors;
mod plan;
mod plan_config;
mod pool;
mod rows;
mod sgemm;
mod slot;
mod snapshot;
mod table;

use pyo3::prelude::*;

/// The compiled core of mlxcel-paged: page pool, budget, page tables, decode plan and CPU attention.
#[pymodule(gil_used = false)]
mod _core {
    use super::*;

    #[pymodule_export]
    use super::attention::{
        cpu_copy_page, cpu_memory_roof, cpu_paged_decode, cpu_paged_prefill, cpu_read_seconds,
        cpu_write_decode, cpu_write_pages, num_threads, simd_level,
    };
    #[pymodule_export]
    use super::bench_plan::bench_plan;
    #[pymodule_export]
    use super::bench_projection::bench_projection;
    #[pymodule_export]
    use super::blas::{blas_num_calls, global_blas_path, install_blas};
    #[pymodule_export]
    use super::budget::{BlockBudget, Reservation};
    #[pymodule_export]
    use super::device_mirror::DeviceMirror;
    #[pymodule_export]
    use super::plan::DecodePlan;
    #[pymodule_export]
    use super::pool::PagePool;
    #[pymodule_export]
    use super::rows::DecodeRows;
    #[pymodule_export]
    use super::slot::Slot;
    #[pymodule_export]
    use super::snapshot::{Csr, PlanSnapshot, StreamList};
    #[pymodule_export]
    use super::table::{Append, PageTable};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        errors::register(module)?;
        module.add("MAX_PROJECTION_ROWS", paged_core::MAX_PROJECTION_ROWS)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

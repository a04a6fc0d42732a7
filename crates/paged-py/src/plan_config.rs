//! Keyword arguments that the constructors of a plan share.

use paged_core::HeadGeometry;
use paged_core::plan::PlanConfig;
use pyo3::prelude::*;

use crate::buffer::{count, optional_count};
use crate::errors::CoreResult;

pub(crate) type Argument<'a, 'py> = &'a Bound<'py, PyAny>;
pub(crate) type Optional<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// Sets the optional values.
pub(crate) fn set_options(
    config: &mut PlanConfig,
    window: Optional<'_, '_>,
    num_work_items: Optional<'_, '_>,
    num_workers: Optional<'_, '_>,
    waves: Optional<'_, '_>,
    num_splits: Optional<'_, '_>,
    batch_invariant: bool,
) -> CoreResult<()> {
    config.window = optional_count("window", window)?;
    config.num_work_items = optional_count("num_work_items", num_work_items)?;
    config.num_workers = optional_count("num_workers", num_workers)?;
    config.waves = optional_count("waves", waves)?.unwrap_or(config.waves);
    config.num_splits = optional_count("num_splits", num_splits)?;
    config.batch_invariant = batch_invariant;
    Ok(())
}

/// Reads the three head counts.
pub(crate) fn heads(
    qo: Argument<'_, '_>,
    kv: Argument<'_, '_>,
    head_dim: Argument<'_, '_>,
) -> CoreResult<HeadGeometry> {
    Ok(HeadGeometry {
        num_qo_heads: count("num_qo_heads", qo)?,
        num_kv_heads: count("num_kv_heads", kv)?,
        head_dim: count("head_dim", head_dim)?,
    })
}

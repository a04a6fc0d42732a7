//! CPU attention over KV pages: decode of a whole batch, causal multi-token queries of one sequence, and page writes.
//!
//! Everything here borrows arrays for the time of one call and checks each of them before touching memory. Kernels are
//! written once over [`simd::Simd`] and compiled per instruction set, chosen at run time; the work is spread over the
//! threads of an [`Executor`].

#![allow(clippy::needless_range_loop, reason = "arrays of registers are indexed alike")]

mod append;
mod array;
mod decode;
mod element;
mod executor;
mod heads;
mod launch;
mod math;
mod output;
mod pages;
mod params;
mod prefill;
mod roof;
mod rows;
mod scratch;
mod sequence;
pub(crate) mod simd;
mod state;
mod tasks;

pub use append::{NewTokens, copy_page, write_decode, write_pages};
pub use array::Array;
pub use decode::{DecodeBatch, WorkItem, decode};
pub use element::{Element, ElementType};
pub use executor::Executor;
pub use launch::AttentionArguments;
pub use pages::{HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, PoolLayout};
pub use params::AttentionParams;
pub use prefill::prefill;
pub use roof::{memory_roof, read_seconds};
pub use sequence::PagedSequence;
pub use simd::SimdLevel;

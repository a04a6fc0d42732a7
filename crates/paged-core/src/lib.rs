//! Page pool, block budget, page tables, decode plan and CPU attention over KV pages.
//!
//! The data goes one way: a [`PagePool`] hands out page ids, a [`PageTable`] orders them per sequence, and a
//! [`DecodePlan`](plan::DecodePlan) lays the tables of a batch out for a kernel. [`BlockBudget`] says how many pages there may
//! be. Nothing here knows Python or a GPU.

#[cfg(not(paged_loom))]
pub mod attention;
mod budget;
mod error;
mod gate;
mod geometry;
mod ids;
pub mod plan;
mod pool;
mod primitive;
#[cfg(not(paged_loom))]
mod projection;
mod rows;
mod table;

pub use budget::{BlockBudget, Reservation};
pub use error::{Error, ErrorKind, Result};
pub use gate::Gate;
pub use geometry::{HeadGeometry, MAX_INDEX, MAX_PAGE_SIZE, PageGeometry};
pub use ids::{PageId, Slot};
pub use pool::PagePool;
#[cfg(not(paged_loom))]
pub use projection::{MAX_PROJECTION_ROWS, Projection};
pub use rows::{DecodeRows, RowGrowth, RowPlace};
pub use table::{Append, PageTable, pages_needed_by};

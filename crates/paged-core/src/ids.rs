//! Identifiers that cross module borders.

/// Index of a page in its pool, less than the pool's `num_pages`, which fits an `i32`.
pub type PageId = u32;

/// A row of the resident table, given to one sequence from `admit` to `retire`.
///
/// The generation changes on every `retire`, so a slot kept beyond its sequence is detected and never mistaken for the
/// next tenant of the same row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot {
    /// Row of the resident table, less than `max_slots`.
    pub index: u32,
    /// How often the row had been retired when this slot was given out (wraps after 2^32).
    pub generation: u32,
}

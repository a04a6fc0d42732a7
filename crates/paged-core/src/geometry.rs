//! Shapes: tokens in pages, heads, and the limits that make every index fit an `i32`.

use crate::error::{Error, Result};

/// Largest page count, token count or index: the device arrays are `i32`.
pub const MAX_INDEX: usize = i32::MAX as usize;

/// Largest accepted page size in tokens.
pub const MAX_PAGE_SIZE: usize = 1 << 16;

/// Checks that `value` lies in `1..=max`.
///
/// # Errors
/// `InvalidArgument` that names `argument`.
pub(crate) fn check_count(argument: &'static str, value: usize, max: usize) -> Result<usize> {
    if value == 0 || value > max {
        return Err(Error::invalid(argument, format!("expected 1..={max}, got {value}")));
    }
    Ok(value)
}

/// Tokens per page, and the arithmetic on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageGeometry {
    page_size: usize,
}

impl PageGeometry {
    /// Creates the geometry of pages of `page_size` tokens.
    ///
    /// # Errors
    /// `InvalidArgument` unless `1 <= page_size <= MAX_PAGE_SIZE`.
    pub fn new(page_size: usize) -> Result<Self> {
        Ok(Self { page_size: check_count("page_size", page_size, MAX_PAGE_SIZE)? })
    }

    /// Tokens per page.
    pub const fn page_size(self) -> usize {
        self.page_size
    }

    /// Pages that hold `num_tokens` tokens from the start of the first page on.
    pub const fn pages_for(self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.page_size)
    }

    /// Tokens in the last of those pages: `1..=page_size`, or 0 without tokens.
    pub const fn last_page_len(self, num_tokens: usize) -> usize {
        if num_tokens == 0 { 0 } else { (num_tokens - 1) % self.page_size + 1 }
    }
}

/// Heads of one attention layer under grouped-query attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadGeometry {
    /// Query and output heads.
    pub num_qo_heads: usize,
    /// Key and value heads; divides `num_qo_heads`.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl HeadGeometry {
    /// Checks the three numbers against each other.
    ///
    /// # Errors
    /// `InvalidArgument` for a zero, a number above 65536, or `num_qo_heads` not a multiple of `num_kv_heads`.
    pub fn check(self) -> Result<Self> {
        const MAX: usize = 1 << 16;
        check_count("num_qo_heads", self.num_qo_heads, MAX)?;
        check_count("num_kv_heads", self.num_kv_heads, MAX)?;
        check_count("head_dim", self.head_dim, MAX)?;
        if !self.num_qo_heads.is_multiple_of(self.num_kv_heads) {
            return Err(Error::invalid(
                "num_qo_heads",
                format!(
                    "expected a multiple of num_kv_heads {}, got {}",
                    self.num_kv_heads, self.num_qo_heads
                ),
            ));
        }
        Ok(self)
    }

    /// Query heads that share one KV head.
    pub const fn group_size(self) -> usize {
        self.num_qo_heads / self.num_kv_heads
    }
}

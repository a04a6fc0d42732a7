//! Page pool, block budget, page tables, decode plan and CPU attention over KV pages.

"""Batch sizes that launches are made with: a batch that changes inside one bucket keeps its launch geometry."""

from __future__ import annotations

_FINE = (1, 2, 4)
_STEP = 8


def bucket_rows(num_rows: int, max_rows: int) -> int:
    """Rows of the launch for a batch of `num_rows`: 1, 2, 4, then multiples of 8, at most `max_rows`."""
    for size in _FINE:
        if num_rows <= size:
            return min(size, max_rows)
    return min(-(-num_rows // _STEP) * _STEP, max_rows)

"""The page estimate against page tables that really grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_paged._core import PagePool, PageTable
from mlxcel_paged.scheduler.estimate import max_pages_held, max_tokens_held


@given(
    chunks=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    page_size=st.sampled_from([1, 2, 3, 4, 8]),
    window=st.none() | st.integers(1, 20),
)
def test_no_sequence_ever_holds_more_than_estimated(chunks: list[int], page_size: int, window: int | None) -> None:
    pool = PagePool(400)
    table = PageTable(pool, page_size, window)
    peak = 0
    for num_tokens in chunks:
        table.retire_head()
        table.append(num_tokens)
        peak = max(peak, table.num_pages)
    assert peak <= max_pages_held(sum(chunks), page_size, window, max(chunks))


@pytest.mark.parametrize("window", [None, 1, 7, 16])
@pytest.mark.parametrize("num_pages", [1, 2, 5, 40])
def test_the_most_tokens_of_a_pool_need_no_more_than_the_pool(num_pages: int, window: int | None) -> None:
    limit = max_tokens_held(num_pages, 4, window, 8)
    assert max_pages_held(10**9 if limit is None else limit, 4, window, 8) <= num_pages

"""Pool and budget as Python sees them: values, errors, lifetimes, threads."""

import gc
import threading

import numpy as np
import pytest

from mlxcel_paged._core import (
    BlockBudget,
    BudgetExceededError,
    BudgetTooSmallError,
    CorruptionError,
    InvalidArgumentError,
    InvalidTypeError,
    OutOfPagesError,
    PagePool,
)


def test_pages_go_out_and_come_back() -> None:
    pool = PagePool(4)
    pages = pool.acquire(3)
    assert sorted(pages) == [0, 1, 2]
    assert (pool.num_pages, pool.num_free, pool.num_used) == (4, 1, 3)
    pool.retain(pages[:1])
    assert pool.refcount(pages[0]) == 2
    assert pool.is_shared(pages[0])
    assert not pool.is_shared(pages[1])
    pool.release(np.array(pages, dtype=np.int64))
    assert pool.num_free == 3
    pool.release(pages[:1])
    pool.check_integrity()
    assert pool.num_free == 4


def test_out_of_pages_takes_nothing_and_says_how_many_there_were() -> None:
    pool = PagePool(4)
    pool.acquire(1)
    with pytest.raises(OutOfPagesError, match="needed 4, free 3") as caught:
        pool.acquire(4)
    assert (caught.value.needed, caught.value.free, caught.value.slug) == (4, 3, "out_of_pages")
    assert pool.num_free == 3


@pytest.mark.parametrize("verb", ["retain", "release"])
def test_misuse_changes_nothing(verb: str) -> None:
    pool = PagePool(4)
    pages = pool.acquire(2)
    free = next(page for page in range(4) if page not in pages)
    with pytest.raises(CorruptionError, match=f"page {free}"):
        getattr(pool, verb)([pages[0], free])
    for outside in (4, 2**31 - 1):
        with pytest.raises(InvalidArgumentError, match=str(outside)):
            getattr(pool, verb)([pages[0], outside])
    assert [pool.refcount(page) for page in pages] == [1, 1]
    pool.check_integrity()


def test_double_release_is_refused() -> None:
    pool = PagePool(2)
    pages = pool.acquire(1)
    with pytest.raises(CorruptionError, match="double release"):
        pool.release(pages * 2)
    pool.release(pages)
    with pytest.raises(CorruptionError, match="double release"):
        pool.release(pages)
    assert pool.num_free == 2


@pytest.mark.parametrize("num_pages", [0, -1, 2**31, 2**64, 2**200])
def test_pool_sizes_out_of_range_name_the_argument(num_pages: int) -> None:
    with pytest.raises(InvalidArgumentError, match="num_pages") as caught:
        PagePool(num_pages)
    assert caught.value.argument == "num_pages"


@pytest.mark.parametrize("value", ["3", 3.0, None, [3]])
def test_a_count_of_another_type_names_the_argument(value: object) -> None:
    with pytest.raises(InvalidTypeError, match="num_pages") as caught:
        PagePool(value)  # type: ignore[arg-type]
    assert caught.value.argument == "num_pages"
    with pytest.raises(InvalidTypeError):
        PagePool(1).refcount(value)  # type: ignore[arg-type]


def test_threads_share_a_pool() -> None:
    pool = PagePool(50)
    failures: list[Exception] = []

    def work() -> None:
        try:
            for count in range(2000):
                try:
                    pages = pool.acquire(count % 20)
                except OutOfPagesError:
                    continue
                pool.retain(pages)
                pool.release(pages)
                pool.release(pages)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.num_free == 50
    pool.check_integrity()


@pytest.mark.parametrize("total_bytes", [0, 999, 1000, 1063])
def test_a_budget_without_a_page_names_the_smallest_usable_one(total_bytes: int) -> None:
    with pytest.raises(BudgetTooSmallError, match="1064") as caught:
        BlockBudget(total_bytes, workspace_bytes=1000, page_bytes=64)
    error = caught.value
    assert (error.total_bytes, error.workspace_bytes, error.page_bytes) == (total_bytes, 1000, 64)
    assert BlockBudget(error.smallest_usable_bytes, workspace_bytes=1000, page_bytes=64).num_pages == 1


def test_a_reservation_ends_by_release_with_block_or_collection() -> None:
    budget = BlockBudget(1640, workspace_bytes=1000, page_bytes=64)
    assert (budget.num_pages, budget.num_available) == (10, 10)
    reservation = budget.reserve(4)
    with budget.reserve(5) as inner:
        assert inner.num_pages == 5
        with pytest.raises(BudgetExceededError) as caught:
            budget.reserve(2)
        assert (caught.value.needed, caught.value.available, caught.value.total) == (2, 1, 10)
    assert budget.num_reserved == 4
    reservation.release()
    reservation.release()
    assert (reservation.num_pages, budget.num_reserved) == (0, 0)
    reservation = budget.reserve(10)
    del reservation
    gc.collect()
    assert budget.num_available == 10

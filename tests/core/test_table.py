"""Page tables as Python sees them."""

import gc
import subprocess
import sys
import threading

import pytest

from mlxcel_paged._core import (
    CorruptionError,
    InvalidArgumentError,
    InvalidTypeError,
    OutOfPagesError,
    PagePool,
    PageTable,
)


def test_append_grows_by_pages() -> None:
    pool = PagePool(10)
    table = PageTable(pool, 4)
    assert table.pages_needed(9) == 3
    append = table.append(9)
    assert append.new_pages == table.pages
    assert append.copies == []
    assert (table.num_tokens, table.kv_len, table.num_pages, table.last_page_len) == (9, 9, 3, 1)
    assert (table.first_page_offset, table.head_page, table.num_held_tokens) == (0, 0, 9)
    assert (table.page_size, table.window) == (4, None)
    assert table.retire_head() == []


def test_a_fork_copies_the_partial_page_before_it_writes() -> None:
    pool = PagePool(10)
    table = PageTable(pool, 4)
    table.append(6)
    fork = table.fork()
    assert fork.pages_needed(1) == 1
    append = fork.append(1)
    assert append.copies == [(table.pages[1], fork.pages[1])]
    assert append.new_pages == []
    assert fork.pages[0] == table.pages[0]
    assert table.append(1).copies == []


def test_a_failed_append_changes_nothing() -> None:
    pool = PagePool(2)
    table = PageTable(pool, 4)
    table.append(5)
    with pytest.raises(OutOfPagesError):
        table.append(4)
    assert (table.num_tokens, pool.num_free) == (5, 0)
    table.append(3)


def test_a_window_gives_head_pages_back() -> None:
    pool = PagePool(10)
    table = PageTable(pool, 4, window=5)
    table.append(15)
    assert (table.kv_len, table.first_page_offset) == (5, 10)
    head = table.pages[:2]
    assert table.retire_head() == head
    assert (table.head_page, table.num_pages, table.first_page_offset, table.num_tokens) == (2, 2, 2, 15)
    assert (table.num_held_tokens, pool.num_used) == (7, 2)


def test_pages_come_back_with_the_table() -> None:
    pool = PagePool(10)
    table = PageTable(pool, 4)
    table.append(10)
    fork = table.fork()
    table.release()
    table.release()
    assert (table.num_tokens, table.pages) == (0, [])
    fork.check_integrity()
    assert pool.num_used == 3
    del fork
    gc.collect()
    assert pool.num_used == 0
    pool.check_integrity()


def test_full_pages_are_adopted() -> None:
    pool = PagePool(8)
    first = PageTable(pool, 4)
    first.append(9)
    second = PageTable(pool, 4)
    second.adopt(first.pages[:2])
    assert (second.num_tokens, second.pages) == (8, first.pages[:2])
    assert [pool.refcount(page) for page in first.pages] == [2, 2, 1]
    with pytest.raises(InvalidArgumentError, match="only an empty table"):
        second.adopt([])
    third = PageTable(pool, 4)
    for pages in ([7], [8]):
        with pytest.raises((CorruptionError, InvalidArgumentError)):
            third.adopt([first.pages[0], *pages])
    assert (third.num_tokens, pool.refcount(first.pages[0])) == (0, 2)


def test_arguments_out_of_range_are_named() -> None:
    pool = PagePool(2)
    for page_size, window, argument in [(0, None, "page_size"), (4, 0, "window"), (-1, None, "page_size")]:
        with pytest.raises(InvalidArgumentError) as caught:
            PageTable(pool, page_size, window)
        assert caught.value.argument == argument
    table = PageTable(pool, 4)
    for num_tokens in (-1, 2**31, 2**70):
        with pytest.raises(InvalidArgumentError, match="num_tokens"):
            table.append(num_tokens)
    with pytest.raises(InvalidTypeError, match="num_tokens"):
        table.append("1")  # type: ignore[arg-type]


def test_pages_of_many_tables_are_asked_for_at_once() -> None:
    pool = PagePool(10)
    tables = [PageTable(pool, 4) for _ in range(3)]
    for table, num_tokens in zip(tables, (4, 5, 6), strict=True):
        table.append(num_tokens)
    forks = [tables[2].fork(), tables[2].fork()]
    assert PageTable.pages_needed_by(tables, 1) == 2
    assert PageTable.pages_needed_by((*tables, *forks), 1) == 3, "the last holder of a page writes it in place"
    assert [table.num_tokens for table in tables] == [4, 5, 6]
    used = pool.num_used
    for table in (*tables, *forks):
        table.append(1)
    assert pool.num_used - used == 3
    assert PageTable.pages_needed_by((), 1) == 0


def test_tables_that_cannot_be_asked_together_are_named() -> None:
    pool = PagePool(4)
    table = PageTable(pool, 4)
    for bad in ([table, PageTable(PagePool(4), 4)], [table, PageTable(pool, 4), table]):
        with pytest.raises(InvalidArgumentError) as caught:
            PageTable.pages_needed_by(bad, 1)
        assert caught.value.argument == "tables"
    for num_tokens in (-1, 2**31):
        with pytest.raises(InvalidArgumentError, match="num_tokens"):
            PageTable.pages_needed_by([table], num_tokens)
    for wrong in (3, [pool], {"a": 1}):
        with pytest.raises(InvalidTypeError, match="tables"):
            PageTable.pages_needed_by(wrong, 1)  # type: ignore[arg-type]
    assert (table.num_tokens, pool.num_free) == (0, 4)


def test_batches_in_different_orders_do_not_wait_for_each_other() -> None:
    pool = PagePool(64)
    tables = [PageTable(pool, 4) for _ in range(8)]

    def ask_and_grow(order: list[PageTable]) -> None:
        for _ in range(10):
            assert PageTable.pages_needed_by(order, 1) <= len(order)
            for table in order:
                table.append(1)

    threads = [threading.Thread(target=ask_and_grow, args=(order,)) for order in (tables, tables[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert [table.num_tokens for table in tables] == [20] * 8


_ARGUMENTS_THAT_ASK_BACK = """
from mlxcel_paged._core import PagePool, PageTable

table, other = PageTable(pool := PagePool(8), 4), PageTable(pool, 4)


class Count:
    def __index__(self):
        return 1 + table.num_tokens


table.append(Count())
assert table.pages_needed(Count()) == 0
assert PageTable.pages_needed_by([table], Count()) == 0
table.append(3)
assert table.num_tokens == 4
other.adopt(page for page in table.pages if other.num_tokens == 0)
assert other.num_tokens == 4
"""


def test_arguments_may_ask_the_table_that_they_are_for() -> None:
    """In a process of its own: a call that waits for itself takes the interpreter with it."""
    subprocess.run([sys.executable, "-c", _ARGUMENTS_THAT_ASK_BACK], check=True, timeout=60)

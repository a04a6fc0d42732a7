"""The rows of a decode batch: tables and plans that grow together."""

from __future__ import annotations

import threading

import pytest

from mlxcel_paged import _core
from mlxcel_paged._core import DecodePlan, DecodeRows, PagePool, PageTable


def new_plan(num_pages: int = 16, page_size: int = 4) -> DecodePlan:
    return DecodePlan(
        max_slots=4,
        max_pages_per_slot=num_pages,
        num_pages=num_pages,
        page_size=page_size,
        num_qo_heads=2,
        num_kv_heads=2,
        head_dim=64,
    )


class Group:
    """One KV group and the tables that are admitted to it."""

    def __init__(self, lengths: list[int], *, num_pages: int = 16) -> None:
        self.pool, self.plan = PagePool(num_pages), new_plan(num_pages)
        self.rows = DecodeRows([self.plan], [self.pool])
        self.tables = [self.table(length) for length in lengths]
        self.slots = [self.rows.admit(0, table) for table in self.tables]

    def table(self, num_tokens: int) -> PageTable:
        table = PageTable(self.pool, 4)
        table.append(num_tokens)
        return table

    @property
    def num_tokens(self) -> list[int]:
        return [table.num_tokens for table in self.tables]

    def step(self) -> list[int]:
        """Takes a step as the scheduler does; returns the rows that got a page."""
        if self.rows.try_advance():
            return []
        grown = self.rows.advance()
        for _, row, append in grown:
            for _, target in append.copies:
                self.plan.replace_page(self.slots[row], self.tables[row].num_pages - 1, target)
            for page in append.new_pages:
                self.plan.append_page(self.slots[row], page)
        if grown:
            self.plan.advance()
        return [row for _, row, _ in grown]


def test_tables_count_every_step_at_once() -> None:
    group = Group([1, 2, 5])
    assert group.step() == []
    assert group.num_tokens == [2, 3, 6]
    assert [table.last_page_len for table in group.tables] == [2, 3, 2]
    assert list(group.plan.export_csr().positions) == [2, 3, 6]
    assert [group.step() for _ in range(4)] == [[], [1], [0, 2], []]
    assert group.num_tokens == [6, 7, 10]
    assert [table.pages_needed(3) for table in group.tables] == [1, 1, 1]
    assert [list(table.pages) for table in group.tables] == [
        list(group.plan.export_csr().indices[begin:end]) for begin, end in zip([0, 2, 4], [2, 4, 7], strict=True)
    ]


def test_a_row_that_left_keeps_its_tokens_and_grows_by_itself() -> None:
    group = Group([1, 1, 1])
    group.step()
    left = group.tables.pop(1)
    group.rows.retire(0, group.slots.pop(1))
    group.step()
    assert (left.num_tokens, group.num_tokens) == (2, [3, 3])
    left.append(1)
    assert group.rows.try_advance(), "it is no business of the batch any more"
    assert (left.num_tokens, group.num_tokens) == (3, [4, 4])


def test_a_table_changed_by_another_way_is_looked_at_anew() -> None:
    group = Group([1, 1])
    group.step()
    fork = group.tables[0].fork()
    assert fork.num_tokens == 2
    assert not group.rows.try_advance(), "the last page is shared"
    ((_, row, append),) = group.rows.advance()
    assert (row, append.new_pages, append.copies) == (0, [], [(fork.pages[0], group.tables[0].pages[0])])
    group.plan.replace_page(group.slots[0], 0, append.copies[0][1])
    group.plan.advance()
    assert (fork.num_tokens, group.num_tokens) == (2, [3, 3])
    group.tables[1].append(1)
    assert group.num_tokens == [3, 4]
    assert not group.rows.try_advance()
    ((_, row, append),) = group.rows.advance()
    assert (row, len(append.new_pages), group.num_tokens) == (1, 1, [4, 5])
    group.tables[0].release()
    assert (group.tables[0].num_tokens, group.tables[0].pages) == (0, [])


def test_all_groups_get_their_pages_or_none() -> None:
    pools, plans = [PagePool(4), PagePool(1)], [new_plan(), new_plan()]
    rows = DecodeRows(plans, pools)
    tables = [PageTable(pool, 4) for pool in pools]
    for group, table in enumerate(tables):
        table.append(4)
        rows.admit(group, table)
    for _ in range(2):
        assert not rows.try_advance()
        with pytest.raises(_core.OutOfPagesError) as caught:
            rows.advance()
        assert (caught.value.needed, caught.value.free) == (1, 0)
        assert [table.num_tokens for table in tables] == [4, 4]
        assert [pool.num_free for pool in pools] == [3, 0]
    assert [list(plan.export_csr().positions) for plan in plans] == [[4], [4]]


def test_plans_edited_by_another_way_are_told() -> None:
    group = Group([1, 1])
    group.plan.advance()
    for call in (group.rows.try_advance, group.rows.advance, lambda: group.rows.admit(0, group.table(1))):
        with pytest.raises(_core.InvalidPlanError, match="another way"):
            call()
    assert group.num_tokens == [1, 1]
    group.plan.retire(group.slots[1])
    with pytest.raises(_core.InvalidPlanError, match="another way"):
        group.rows.retire(0, group.slots[0])
    assert group.plan.num_rows == 1


def test_a_plan_that_lacks_a_page_of_its_table_stops_the_step() -> None:
    group = Group([3])
    group.tables[0].append(2)  # the plan is not told
    group.tables[0].append(1)
    assert group.rows.advance() == []
    with pytest.raises(_core.InvalidPlanError, match="has no page"):
        group.rows.try_advance()
    with pytest.raises(_core.InvalidPlanError, match="has no page"):
        group.rows.advance()
    assert group.num_tokens == [7]


def test_rows_leave_after_a_step_that_was_not_brought_to_an_end() -> None:
    group = Group([4, 1])
    assert len(group.rows.advance()) == 1, "the plan is told of no page and takes no step"
    with pytest.raises(_core.InvalidPlanError, match="another way"):
        group.rows.try_advance()
    for slot in group.slots:
        group.rows.retire(0, slot)
    for table in group.tables:
        table.release()
    assert group.pool.num_used == 0
    group.tables = [group.table(2)]
    group.slots = [group.rows.admit(0, group.tables[0])]
    assert [group.step() for _ in range(3)] == [[], [], [0]]
    assert group.num_tokens == list(group.plan.export_csr().positions) == [5]


def test_a_table_has_one_row() -> None:
    group = Group([1])
    with pytest.raises(_core.InvalidArgumentError, match="row already") as caught:
        group.rows.admit(0, group.tables[0])
    assert caught.value.argument == "table"
    assert group.step() == []
    assert (group.plan.num_rows, group.num_tokens) == (1, [2])
    group.rows.retire(0, group.slots[0])
    group.slots = [group.rows.admit(0, group.tables[0])]
    assert group.step() == []


def test_bad_arguments_change_nothing() -> None:
    group = Group([1])
    other = PagePool(4)
    with pytest.raises(_core.InvalidArgumentError, match="already"):
        DecodeRows([group.plan], [group.pool])
    with pytest.raises(_core.InvalidArgumentError, match="twice"):
        DecodeRows([plan := new_plan(), plan], [other, other])
    with pytest.raises(_core.InvalidArgumentError, match="pools"):
        DecodeRows([new_plan()], [])
    for table in (PageTable(other, 4), PageTable(group.pool, 8)):
        with pytest.raises(_core.InvalidArgumentError, match="table"):
            group.rows.admit(0, table)
    with pytest.raises(_core.InvalidArgumentError, match="group"):
        group.rows.admit(1, group.table(1))
    with pytest.raises(_core.InvalidArgumentError, match="group"):
        group.rows.retire(1, group.slots[0])
    group.rows.retire(0, group.slots[0])
    with pytest.raises(_core.StaleSlotError):
        group.rows.retire(0, group.slots[0])
    assert group.rows.advance() == []
    assert (group.plan.num_rows, group.num_tokens) == (0, [1])


def test_other_threads_see_whole_steps() -> None:
    group = Group([1, 1], num_pages=2000)
    done = threading.Event()
    wrong: list[tuple[int, int, int]] = []

    def watch() -> None:
        last = 0
        while not done.is_set():
            table = group.tables[0]
            num_tokens, num_pages, after = table.num_tokens, table.num_pages, table.num_tokens
            if num_tokens < last or not -(-num_tokens // 4) <= num_pages <= -(-after // 4):
                wrong.append((num_tokens, num_pages, after))
            last = num_tokens

    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(3000):
        group.step()
    done.set()
    thread.join()
    assert wrong == []
    assert group.num_tokens == [3001, 3001]

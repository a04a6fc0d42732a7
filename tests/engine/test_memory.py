"""The memory plan at the edges of a budget, and that what it promises is what sequences need."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_paged.engine.available import available_host_bytes
from mlxcel_paged.engine.memory import AUTO_SHARE, GroupShape, plan_memory
from mlxcel_paged.errors import BudgetTooSmallError
from mlxcel_paged.scheduler.estimate import max_pages_held

WORKSPACE = 1000
PAGE = 640


def plan(groups: list[GroupShape] | None = None, **overrides: Any) -> Any:
    arguments: dict[str, Any] = {
        "budget_bytes": None,
        "available_bytes": 1 << 30,
        "workspace_bytes": WORKSPACE,
        "page_size": 16,
        "max_batch": 4,
        "max_context": 1000,
        "prefill_chunk": 64,
    }
    return plan_memory(groups or [GroupShape(PAGE)], **{**arguments, **overrides})


@pytest.mark.parametrize("budget", [0, 1, WORKSPACE - 1, WORKSPACE, WORKSPACE + PAGE - 1])
def test_a_budget_without_a_page_is_refused_with_the_smallest_usable_one(budget: int) -> None:
    with pytest.raises(BudgetTooSmallError, match=str(WORKSPACE + PAGE)) as caught:
        plan(budget_bytes=budget)
    assert caught.value.smallest_usable_bytes == WORKSPACE + PAGE
    assert plan(budget_bytes=caught.value.smallest_usable_bytes).num_pages == (1,)


def test_the_workspace_comes_out_before_pages_are_counted() -> None:
    for budget, num_pages in ((WORKSPACE + PAGE, 1), (WORKSPACE + 2 * PAGE - 1, 1), (WORKSPACE + 2 * PAGE, 2)):
        memory = plan(budget_bytes=budget)
        assert memory.num_pages == (num_pages,)
        assert memory.total_bytes == WORKSPACE + num_pages * PAGE <= budget


def test_an_automatic_budget_is_what_full_sequences_need_and_no_more_than_its_share() -> None:
    assert plan().num_pages == (4 * 63,)
    memory = plan(available_bytes=100_000)
    assert memory.is_auto
    assert memory.budget_bytes == int(100_000 * AUTO_SHARE)
    assert memory.num_pages == ((memory.budget_bytes - WORKSPACE) // PAGE,)
    with pytest.raises(BudgetTooSmallError):
        plan(available_bytes=WORKSPACE)


def test_a_pool_smaller_than_the_context_is_planned_all_the_same() -> None:
    assert plan(budget_bytes=WORKSPACE + 3 * PAGE, max_context=10**6).num_pages == (3,)


def test_more_than_the_memory_that_is_left_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 1\.0 GiB.* got 2\.0 GiB"):
        plan(budget_bytes=2 << 30)


@given(
    page_bytes=st.lists(st.integers(1, 10**6), min_size=1, max_size=3),
    windows=st.lists(st.none() | st.integers(1, 500), min_size=3, max_size=3),
    budget=st.integers(0, 10**8),
)
def test_any_budget_is_either_refused_or_filled(page_bytes: list[int], windows: list[int | None], budget: int) -> None:
    groups = [GroupShape(size, window) for size, window in zip(page_bytes, windows, strict=False)]
    least = WORKSPACE + sum(page_bytes)
    if budget < least:
        with pytest.raises(BudgetTooSmallError):
            plan(groups, budget_bytes=budget)
        return
    memory = plan(groups, budget_bytes=budget)
    assert memory.total_bytes <= budget
    assert min(memory.num_pages) >= 1
    needs = [4 * max_pages_held(1000, 16, group.window, 64) for group in groups]
    full = [count for count, group in zip(memory.num_pages, groups, strict=True) if group.window is None]
    largest = max(memory.num_pages)
    for count, need, group in zip(memory.num_pages, needs, groups, strict=True):
        assert count == largest if group.window is None else count == min(largest, need)
    if full:
        grown = [
            largest + 1 if group.window is None else min(largest + 1, need)
            for group, need in zip(groups, needs, strict=True)
        ]
        assert WORKSPACE + sum(count * group.page_bytes for count, group in zip(grown, groups, strict=True)) > budget


def test_this_machine_has_memory() -> None:
    assert available_host_bytes() > 1 << 20

"""The memory plan: from a byte budget to workspace and pages per KV group.

The kernels' workspace comes out of the budget first, then pages are counted. Groups grow together: with n pages in the
groups that keep everything, a window group needs min(n, what all windows hold) pages, so n is the one unknown.
Admission uses the same formula for pages (`scheduler.estimate`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from mlxcel_paged._core import BlockBudget
from mlxcel_paged.byte_size import format_bytes
from mlxcel_paged.errors import InvalidFieldError
from mlxcel_paged.scheduler.estimate import max_pages_held

AUTO_SHARE = 0.5
"""Part of the memory left beside the weights that an automatic budget takes. The rest is for activations, MLX's buffer
cache and whatever else runs on the machine."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What the planner needs to know about a KV group.

    Attributes:
        page_bytes: one page in all layers of the group, keys and values.
        window: visible tokens, or None.
    """

    page_bytes: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine allocates for keys, values and kernels.

    Attributes:
        budget_bytes: what it was planned within.
        is_auto: whether the budget was derived here.
        workspace_bytes: reserved for the kernels' partial results.
        num_pages: pages per KV group.
        pool_bytes: bytes of all pages.
        activation_bytes: what a step needs besides, outside the budget; an estimate.
    """

    budget_bytes: int
    is_auto: bool
    workspace_bytes: int
    num_pages: tuple[int, ...]
    pool_bytes: int
    activation_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """What the budget pays for."""
        return self.workspace_bytes + self.pool_bytes

    @property
    def peak_bytes(self) -> int:
        """What is allocated beside the weights at most."""
        return self.total_bytes + self.activation_bytes


def plan_memory(
    groups: Seq[GroupShape],
    *,
    budget_bytes: int | None,
    available_bytes: int,
    workspace_bytes: int,
    page_size: int,
    max_batch: int,
    max_context: int,
    prefill_chunk: int,
    activation_bytes: int = 0,
) -> MemoryPlan:
    """Plans pages for every group.

    Args:
        groups: at least one.
        budget_bytes: bytes for pages and workspace; None takes `AUTO_SHARE` of `available_bytes`, at most what
            `max_batch` sequences of `max_context` tokens need.
        available_bytes: memory that is left with the weights loaded.
        workspace_bytes: what the kernels need.
        page_size: tokens in a page.
        max_batch: sequences that hold pages at once.
        max_context: tokens of one sequence at most.
        prefill_chunk: tokens of a prefill chunk at most.
        activation_bytes: what a step needs besides; it comes out of `available_bytes`, not of the budget.

    Raises:
        BudgetTooSmallError: no page of every group fits beside the workspace; it names the smallest usable budget.
        InvalidFieldError: the budget asks for more than the memory that is left.
    """
    needs = [max_batch * max_pages_held(max_context, page_size, group.window, prefill_chunk) for group in groups]
    wanted = workspace_bytes + _bytes(groups, needs)
    left_bytes = max(0, available_bytes - activation_bytes)
    if budget_bytes is None:
        budget = min(int(left_bytes * AUTO_SHARE), wanted)
    elif budget_bytes > left_bytes:
        raise InvalidFieldError(
            "kv_cache_budget",
            budget_bytes,
            f"at most {format_bytes(left_bytes)}, the memory that is left beside the weights and the "
            f"{format_bytes(activation_bytes)} that a step needs",
            got=format_bytes(budget_bytes),
        )
    else:
        budget = budget_bytes
    # Checks the budget with the core's arithmetic; it counts pages as if every group grew without bound.
    BlockBudget(budget, workspace_bytes=workspace_bytes, page_bytes=sum(group.page_bytes for group in groups))
    num_pages = _grow(groups, needs, budget - workspace_bytes)
    return MemoryPlan(
        budget, budget_bytes is None, workspace_bytes, num_pages, _bytes(groups, num_pages), activation_bytes
    )


def _grow(groups: Seq[GroupShape], needs: Seq[int], budget_bytes: int) -> tuple[int, ...]:
    """Finds the largest n whose pages fit: n pages per group, less where a window needs no more."""

    def pages(n: int) -> list[int]:
        return [n if group.window is None else min(n, need) for group, need in zip(groups, needs, strict=True)]

    unbounded = [group.page_bytes for group in groups if group.window is None]
    low, high = 1, max(1, budget_bytes // min(unbounded) if unbounded else max(needs))
    while low < high:
        middle = (low + high + 1) // 2
        if _bytes(groups, pages(middle)) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return tuple(pages(low))


def _bytes(groups: Seq[GroupShape], num_pages: Seq[int]) -> int:
    return sum(group.page_bytes * count for group, count in zip(groups, num_pages, strict=True))

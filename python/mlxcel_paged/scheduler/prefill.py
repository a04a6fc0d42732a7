"""How one step's prefill budget is shared."""

from __future__ import annotations

from collections.abc import Sequence as Seq


def split_budget(remaining: Seq[int], budget: int) -> list[int]:
    """Shares `budget` tokens among prompts that still need `remaining` tokens each, oldest first.

    Half of the budget belongs to the oldest prompt, so it advances in every step. The other half goes to prompts that
    need less than the oldest, shortest first: a short prompt starts within a few steps beside a long one. What they
    leave goes to the oldest, then to the others by age.

    Args:
        remaining: tokens left per prompt, each at least 1, oldest first.
        budget: tokens, at least 1.

    Returns:
        Tokens per prompt, in the same order; their sum is min(budget, sum(remaining)).
    """
    shares = [0] * len(remaining)

    def give(index: int, limit: int) -> None:
        nonlocal budget
        share = min(remaining[index] - shares[index], limit, budget)
        shares[index] += share
        budget -= share

    if remaining:
        give(0, (budget + 1) // 2)
    shorter = [index for index in range(1, len(remaining)) if remaining[index] < remaining[0]]
    for index in sorted(shorter, key=lambda index: remaining[index]):
        give(index, budget)
    for index in range(len(remaining)):
        give(index, budget)
    return shares

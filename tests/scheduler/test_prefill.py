"""How a step's prefill budget is shared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxcel_paged.scheduler.prefill import split_budget


def test_one_prompt_gets_the_whole_budget() -> None:
    assert split_budget([1000], 512) == [512]
    assert split_budget([100], 512) == [100]


def test_a_short_prompt_starts_beside_a_long_one_and_both_advance() -> None:
    assert split_budget([10_000, 300, 40], 512) == [256, 216, 40]


def test_prompts_that_are_not_shorter_wait_for_the_oldest() -> None:
    assert split_budget([1000, 1000, 2000], 512) == [512, 0, 0]


def test_what_the_oldest_does_not_need_goes_on_by_age() -> None:
    assert split_budget([100, 1000, 2000], 512) == [100, 412, 0]


@given(st.lists(st.integers(1, 5000), max_size=8), st.integers(1, 4096))
def test_the_budget_is_used_and_never_exceeded(remaining: list[int], budget: int) -> None:
    shares = split_budget(remaining, budget)
    assert sum(shares) == min(budget, sum(remaining))
    assert all(0 <= share <= left for share, left in zip(shares, remaining, strict=True))
    if remaining:
        assert shares[0] >= min(remaining[0], (budget + 1) // 2)

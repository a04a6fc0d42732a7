"""Faults of other servers' schedulers, by the number that notes on them give, with a scripted model."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from mlxcel_paged.request import FinishReason
from scheduler.scripted import VOCAB_SIZE, Loop, make_group, make_loop, solo

depths = pytest.mark.parametrize("depth", [0, 1])
caches = pytest.mark.parametrize("prefix_cache", [False, True])


def prompt_of(length: int, salt: int = 0) -> list[int]:
    source = random.Random(f"{length} {salt}")
    return [source.randrange(VOCAB_SIZE) for _ in range(length)]


@pytest.fixture
def loop_of() -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def make(*groups: Any, **limits: Any) -> Loop:
        loops.append(make_loop(groups, **limits))
        return loops[-1]

    yield make
    for loop in loops:
        loop.check_drained()


@depths
def test_b10_a_failed_step_gives_its_pages_back(loop_of: Callable[..., Loop], depth: int) -> None:
    def fail(phase: str, step: Any) -> Exception | None:
        return RuntimeError("injected") if phase == "collect" and step.step_id == 3 else None

    loop = loop_of(make_group(8, 4), pipeline_depth=depth, fail=fail)
    for index in range(3):
        loop.add(str(index), prompt_of(5, index), 12)
    loop.run()
    assert loop.scheduler.stats().num_finished[FinishReason.ERROR] > 0
    loop.check_drained()
    loop.add("after", prompt_of(20), 10)  # takes nearly the whole pool
    loop.run()
    assert loop.tokens("after") == solo(prompt_of(20), 10)


@depths
@caches
def test_b12_eight_pages_for_four_that_need_four_each(
    loop_of: Callable[..., Loop], depth: int, prefix_cache: bool
) -> None:
    loop = loop_of(make_group(8, 4), pipeline_depth=depth, prefix_cache=prefix_cache)
    for index in range(4):
        loop.add(str(index), prompt_of(3, index), 13)
    loop.run()
    num_tokens = 0
    for index in range(4):
        assert loop.tokens(str(index)) == solo(prompt_of(3, index), 13)
        num_tokens += 13
    assert 0 < loop.scheduler.stats().num_preemptions <= 8
    assert loop.num_turns <= 3 * num_tokens


@depths
def test_b14_prompts_around_the_window_run_together(loop_of: Callable[..., Loop], depth: int) -> None:
    loop = loop_of(make_group(80, 4), make_group(80, 4, window=10), pipeline_depth=depth, max_batch_size=8)
    for length in (3, 9, 10, 11, 30):
        loop.add(str(length), prompt_of(length), 15)
    loop.run()
    for length in (3, 9, 10, 11, 30):
        assert loop.tokens(str(length)) == solo(prompt_of(length), 15, (None, 10))


@depths
@caches
def test_b15_arrivals_in_every_step_join_at_any_moment(
    loop_of: Callable[..., Loop], depth: int, prefix_cache: bool
) -> None:
    loop = loop_of(make_group(120, 4), pipeline_depth=depth, max_batch_size=6, prefix_cache=prefix_cache)
    lengths = [1 + (17 * index) % 64 for index in range(60)]
    for index, length in enumerate(lengths):
        loop.add(str(index), prompt_of(length, index), 7)
        loop.turn()
    loop.run()
    for index, length in enumerate(lengths):
        assert loop.tokens(str(index)) == solo(prompt_of(length, index), 7)


def test_b44_a_short_prompt_with_a_huge_max_tokens_is_admitted(loop_of: Callable[..., Loop]) -> None:
    loop = loop_of(make_group(250, 4), max_context=100_000)
    loop.add("huge", prompt_of(30), 8192)
    loop.add("short", prompt_of(4), 5)
    for _ in range(15):
        loop.turn()
    assert loop.tokens("short") == solo(prompt_of(4), 5)
    loop.scheduler.abort("huge")
    loop.run()


@caches
def test_b45_after_peaks_a_small_request_is_admitted_at_once(loop_of: Callable[..., Loop], prefix_cache: bool) -> None:
    loop = loop_of(make_group(40, 4), max_batch_size=6, prefix_cache=prefix_cache)
    for peak in range(20):
        for index in range(8):
            loop.add(f"{peak} {index}", prompt_of(20 + index, peak), 20)
        loop.run(max_turns=loop.num_turns + 5000)
        loop.add(f"{peak} small", prompt_of(9, peak), 3)
        loop.turn()
        stats = loop.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (1, 0)
        loop.run(max_turns=loop.num_turns + 100)


@depths
@caches
def test_b48_b53_an_exhausted_pool_preempts_and_every_answer_is_complete(
    loop_of: Callable[..., Loop], depth: int, prefix_cache: bool
) -> None:
    loop = loop_of(make_group(24, 4), pipeline_depth=depth, max_batch_size=8, prefix_cache=prefix_cache)
    for index in range(40):
        loop.add(str(index), prompt_of(1 + index % 20, index), 60)
    loop.run(max_turns=50_000)
    for index in range(40):
        assert loop.tokens(str(index)) == solo(prompt_of(1 + index % 20, index), 60)
        assert loop.finish_reasons(str(index)) == [FinishReason.LENGTH]
    assert 0 < loop.scheduler.stats().num_preemptions <= 40 * 6


@depths
@caches
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_b54_b59_b60_random_aborts_free_everything_once(
    loop_of: Callable[..., Loop], depth: int, prefix_cache: bool, page_size: int
) -> None:
    """The scripted runner fails if a page of a step in flight is given back, or a shared page is written to."""
    loop = loop_of(
        make_group(160 // page_size, page_size), pipeline_depth=depth, prefix_cache=prefix_cache, max_batch_size=4
    )
    source = random.Random(page_size)
    for index in range(250):
        loop.add(str(index), prompt_of(source.randint(1, 40), index % 5), source.randint(1, 30))
        for _ in range(source.randint(0, 6)):
            loop.turn()
        if source.random() < 0.8:
            loop.scheduler.abort(str(source.randint(max(0, index - 8), index)))
            loop.events += loop.scheduler.take_events()
        loop.scheduler.check_integrity()
    loop.run(max_turns=loop.num_turns + 20_000)
    for index in range(250):
        assert len(loop.finish_reasons(str(index))) == 1
    for index in range(20):
        loop.add(f"after {index}", prompt_of(8, index), 5)
    loop.run(max_turns=loop.num_turns + 1000)
    for index in range(20):
        assert loop.tokens(f"after {index}") == solo(prompt_of(8, index), 5)


def test_b61_thousands_of_tiny_requests_leave_no_table_grown(loop_of: Callable[..., Loop]) -> None:
    loop = loop_of(make_group(30, 4), prefix_cache=True)
    for index in range(5000):
        loop.scheduler.add(tiny(index))
        if index % 8 == 7:
            while loop.turn():
                pass
            loop.events.clear()
    while loop.turn():
        pass
    scheduler = loop.scheduler
    assert not any(scheduler.counts().values())
    assert len(scheduler._waiting) == 0
    cache = scheduler.groups.prefix_cache
    assert cache is not None
    assert cache.num_pages <= 30
    loop.events.clear()


def tiny(index: int) -> Any:
    from mlxcel_paged.request import Request, SamplingParams

    return Request(str(index), prompt_of(1 + index % 6, index), SamplingParams(max_tokens=2), 0.0)

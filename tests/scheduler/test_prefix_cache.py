"""Cached pages: found by content only, published only when computed for certain, given up before anybody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxcel_paged._core import PagePool, PageTable
from mlxcel_paged.request import FinishReason, Request
from mlxcel_paged.scheduler.prefix_cache import PrefixCache
from mlxcel_paged.scheduler.sequence import Sequence

from .scripted import VOCAB_SIZE, Loop, make_group, make_loop, solo

PAGE = 4
depths = pytest.mark.parametrize("depth", [0, 1])


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(13 * at + 7 * salt + at * at) % VOCAB_SIZE for at in range(length)]


@pytest.fixture
def loop_of() -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def make(num_pages: int, **limits: Any) -> Loop:
        loops.append(make_loop([make_group(num_pages, PAGE)], **{"prefix_cache": True, **limits}))
        return loops[-1]

    yield make
    for loop in loops:
        loop.check_drained()


def run(loop: Loop, name: str, prompt: list[int], max_tokens: int = 6) -> int:
    """Runs one request alone, checks its tokens, and returns how many of its prompt were cached."""
    loop.add(name, prompt, max_tokens)
    loop.run(max_turns=loop.num_turns + 1000)
    assert loop.tokens(name) == solo(prompt, max_tokens)
    [start] = [event.start for event in loop.events if event.request_id == name and event.start is not None]
    return start.num_cached_tokens


@depths
@pytest.mark.parametrize("length", [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1, 29])
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_a_repeated_prompt_computes_one_token_at_least(
    loop_of: Callable[..., Loop], depth: int, length: int, max_tokens: int
) -> None:
    loop = loop_of(64, pipeline_depth=depth)
    assert run(loop, "cold", prompt_of(length), max_tokens) == 0
    expected = (length - 1) // PAGE * PAGE
    assert run(loop, "warm", prompt_of(length), max_tokens) == expected
    assert run(loop, "again", prompt_of(length), max_tokens) == expected
    stats = loop.scheduler.stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (3 * length, 2 * expected)


@depths
def test_an_answer_is_part_of_the_next_turns_prefix(loop_of: Callable[..., Loop], depth: int) -> None:
    loop = loop_of(64, pipeline_depth=depth)
    first = prompt_of(10)
    run(loop, "first", first, 15)
    turn = first + solo(first, 15) + prompt_of(5, salt=9)
    # The last token of the answer was never an input, so its key and value are not there.
    assert run(loop, "second", turn) == (10 + 14) // PAGE * PAGE


@depths
def test_the_common_pages_of_different_prompts_are_shared(loop_of: Callable[..., Loop], depth: int) -> None:
    loop = loop_of(200, pipeline_depth=depth, max_batch_size=8)
    shared = prompt_of(37)
    run(loop, "0", [*shared, 1, 2, 3])
    for index in range(1, 8):
        loop.add(str(index), [*shared, index, index + 1, index + 2], 6)
    loop.turn()
    used = loop.scheduler.stats().num_pages_used
    assert used[0] <= 9 + 7 * 3  # nine shared pages, and each its own few
    loop.run()
    for index in range(1, 8):
        assert loop.tokens(str(index)) == solo([*shared, index, index + 1, index + 2], 6)
    assert loop.scheduler.stats().num_prefix_hits == 7 * 36


def test_pages_are_given_up_least_recently_used_first_and_before_anybody_waits(loop_of: Callable[..., Loop]) -> None:
    loop = loop_of(12)
    run(loop, "a", prompt_of(17, 1), 2)
    run(loop, "b", prompt_of(17, 2), 2)
    assert loop.scheduler.stats().num_pages_cached == (8,)
    assert run(loop, "a again", prompt_of(17, 1), 2) == 16
    run(loop, "c", prompt_of(21, 3), 2)
    stats = loop.scheduler.stats()
    assert stats.num_preemptions == 0
    assert stats.num_evicted_pages == 2
    assert run(loop, "a third", prompt_of(17, 1), 1) == 16
    # Its deepest pages went first, so what is left of it is still a prefix.
    assert run(loop, "b again", prompt_of(17, 2), 1) == 8


@depths
def test_a_full_cache_never_keeps_requests_from_running(loop_of: Callable[..., Loop], depth: int) -> None:
    loop = loop_of(8, pipeline_depth=depth)
    for index in range(20):
        loop.add(str(index), prompt_of(5 + index % 7, index), 12)
    loop.run()
    for index in range(20):
        assert loop.tokens(str(index)) == solo(prompt_of(5 + index % 7, index), 12)
    assert loop.scheduler.stats().num_evicted_pages > 0
    clamped = 8 * PAGE - 20 + 1
    run(loop, "the whole pool", prompt_of(20, 99), clamped)


def test_a_preempted_sequence_may_find_its_own_pages(loop_of: Callable[..., Loop]) -> None:
    loop = loop_of(8, max_batch_size=4)
    for index in range(4):
        loop.add(str(index), prompt_of(3, index), 13)
    loop.run()
    for index in range(4):
        assert loop.tokens(str(index)) == solo(prompt_of(3, index), 13)
    assert 0 < loop.scheduler.stats().num_preemptions <= 8


def test_window_groups_and_dense_storage_keep_nothing() -> None:
    for groups in ([], [make_group(32, PAGE, window=6)], [make_group(32, PAGE), make_group(32, PAGE, window=6)]):
        loop = make_loop(groups, prefix_cache=True)
        assert loop.scheduler.groups.prefix_cache is None
        loop.add("a", prompt_of(12), 4)
        loop.run()
        loop.check_drained()


def test_tokens_whose_hashes_collide_are_told_apart() -> None:
    """`hash(-1) == hash(-2)` in CPython, so these two pages are one to every hash table until they are compared."""
    assert hash((-1, 5, 6, 7)) == hash((-2, 5, 6, 7))
    pool = PagePool(8)
    cache = PrefixCache([pool], PAGE)
    sequence = Sequence(Request("a", [1]), sequence_id=0, max_tokens=1, seed=0, stop_token_ids=frozenset())
    sequence.tables = [PageTable(pool, PAGE)]
    sequence.tables[0].append(PAGE)
    sequence.token_ids = [-1, 5, 6, 7]
    sequence.num_committed_tokens = PAGE
    cache.publish(sequence)
    assert len(cache.find([-1, 5, 6, 7, 8])) == 1
    assert cache.find([-2, 5, 6, 7, 8]) == []
    sequence.tables[0].release()
    cache.leave(sequence)
    cache.check_integrity()
    cache.evict(5)
    assert (pool.num_used, cache.num_pages) == (0, 0)


@depths
def test_a_failed_step_publishes_nothing(loop_of: Callable[..., Loop], depth: int) -> None:
    failing = {1}
    loop = loop_of(
        64,
        pipeline_depth=depth,
        fail=lambda phase, step: RuntimeError("injected") if phase == "collect" and step.step_id in failing else None,
    )
    loop.add("fails", prompt_of(30), 4)
    loop.run()
    assert loop.finish_reasons("fails") == [FinishReason.ERROR]
    assert loop.scheduler.stats().num_pages_cached == (2,)  # the first chunk of 8, which was computed
    failing.clear()
    assert run(loop, "cold but for it", prompt_of(30), 4) == 8

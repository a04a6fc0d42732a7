"""Faults that prefix caches of other servers had, by the number that notes on them give: none may occur here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from scheduler.scripted import VOCAB_SIZE, Loop, make_group, make_loop, solo

PAGE = 4
depths = pytest.mark.parametrize("depth", [0, 1])


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(11 * at + 5 * salt + at * at) % VOCAB_SIZE for at in range(length)]


@pytest.fixture
def loop_of() -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def make(num_pages: int, depth: int, **limits: int) -> Loop:
        group = make_group(num_pages, PAGE)
        loops.append(make_loop([group], pipeline_depth=depth, prefix_cache=True, **limits))
        return loops[-1]

    yield make
    for loop in loops:
        loop.check_drained()


@depths
def test_b22_b26_secrets_after_a_shared_prefix_stay_apart_under_eviction(
    loop_of: Callable[..., Loop], depth: int
) -> None:
    loop = loop_of(24, depth)
    prompts = {str(index): [*prompt_of(18), index % VOCAB_SIZE, 3 * index % VOCAB_SIZE] for index in range(60)}
    for name, prompt in prompts.items():
        loop.add(name, prompt, 9)
    loop.run()
    for name, prompt in prompts.items():
        assert loop.tokens(name) == solo(prompt, 9)
    starts = {event.request_id: event.start for event in loop.events if event.start is not None}
    assert all(start.num_cached_tokens in (0, 4, 8, 12, 16) for start in starts.values())
    assert loop.scheduler.stats().num_prefix_hits == sum(start.num_cached_tokens for start in starts.values()) > 0


@depths
def test_b27_two_that_compute_the_same_prefix_side_by_side_keep_their_own_pages(
    loop_of: Callable[..., Loop], depth: int
) -> None:
    loop = loop_of(40, depth, prefill_chunk=64)
    prompt = prompt_of(25)
    loop.add("a", prompt, 14)
    loop.add("b", prompt, 14)
    loop.turn()
    loop.turn()
    loop.add("c", prompt_of(30, salt=3), 14)
    loop.run()
    assert loop.tokens("a") == loop.tokens("b") == solo(prompt, 14)
    assert loop.tokens("c") == solo(prompt_of(30, salt=3), 14)


@depths
@pytest.mark.parametrize("turns", range(1, 6))
def test_b28_a_prompt_that_is_aborted_between_chunks_leaves_nothing_unfinished_behind(
    loop_of: Callable[..., Loop], depth: int, turns: int
) -> None:
    loop = loop_of(64, depth)
    prompt = prompt_of(40)
    loop.add("leaves", prompt, 5)
    for _ in range(turns):
        loop.turn()
    loop.scheduler.abort("leaves")
    loop.run()
    for name in ("once", "twice"):
        loop.add(name, prompt, 5)
        loop.run(max_turns=loop.num_turns + 1000)
        assert loop.tokens(name) == solo(prompt, 5)


@depths
@pytest.mark.parametrize("length", [PAGE, 2 * PAGE, 5 * PAGE, 5 * PAGE - 1, 5 * PAGE + 1])
def test_b30_a_prompt_that_is_cached_in_full_still_computes_its_last_token(
    loop_of: Callable[..., Loop], depth: int, length: int
) -> None:
    loop = loop_of(64, depth)
    for name in ("cold", "warm", "hot"):
        loop.add(name, prompt_of(length), 1)
        loop.run(max_turns=loop.num_turns + 1000)
        assert loop.tokens(name) == solo(prompt_of(length), 1)


@depths
def test_b13_hits_and_misses_run_in_one_batch(loop_of: Callable[..., Loop], depth: int) -> None:
    loop = loop_of(400, depth, max_batch_size=8)
    loop.add("warm", prompt_of(40), 3)
    loop.run()
    prompts = {}
    for index in range(36):
        prompts[str(index)] = [*prompt_of(40), index] if index % 2 else prompt_of(7 + index, salt=index)
        loop.add(str(index), prompts[str(index)], 6)
    loop.run(max_turns=loop.num_turns + 5000)
    for name, prompt in prompts.items():
        assert loop.tokens(name) == solo(prompt, 6)


def test_b34_eight_requests_with_a_long_shared_prompt_use_it(loop_of: Callable[..., Loop]) -> None:
    loop = loop_of(2000, 0, max_batch_size=8, prefill_chunk=512)
    shared = prompt_of(700)
    for index in range(8):
        loop.add(str(index), [*shared, index], 2)
        loop.run(max_turns=loop.num_turns + 1000)
    starts = [event.start.num_cached_tokens for event in loop.events if event.start is not None]
    assert starts == [0] + [700 // PAGE * PAGE] * 7

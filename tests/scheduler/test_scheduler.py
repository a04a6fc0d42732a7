"""One scheduler, a scripted model, both pipeline depths: what runs when, and that it gives what it gives alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from mlxcel_paged.request import ContextLengthExceededError, FinishReason, InvalidRequestError
from mlxcel_paged.scheduler import Step
from mlxcel_paged.scheduler.sequence import Sequence

from .scripted import VOCAB_SIZE, Loop, make_group, solo

LoopOf = Callable[..., Loop]
depths = pytest.mark.parametrize("depth", [0, 1])


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(index * 7 + salt * 13 + 1) % VOCAB_SIZE for index in range(length)]


@depths
@pytest.mark.parametrize("page_size", [1, 4, 8])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 16, 17, 25])
def test_every_prompt_length_gives_what_it_gives_alone(
    loop_of: LoopOf, depth: int, page_size: int, length: int
) -> None:
    loop = loop_of([make_group(64, page_size)], pipeline_depth=depth)
    loop.add("a", prompt_of(length), 10)
    loop.run()
    assert loop.tokens("a") == solo(prompt_of(length), 10)
    assert loop.finish_reasons("a") == [FinishReason.LENGTH]


@depths
def test_requests_of_different_lengths_together_give_what_each_gives_alone(loop_of: LoopOf, depth: int) -> None:
    loop = loop_of([make_group(200, 4)], pipeline_depth=depth)
    for salt in range(12):
        loop.add(str(salt), prompt_of(1 + 5 * salt, salt), 5 + salt)
    loop.run()
    for salt in range(12):
        assert loop.tokens(str(salt)) == solo(prompt_of(1 + 5 * salt, salt), 5 + salt)
    assert loop.runner.max_batch == 4


@depths
def test_two_groups_with_a_window_give_head_pages_back_while_decoding(loop_of: LoopOf, depth: int) -> None:
    groups = [make_group(100, 4), make_group(20, 4, window=6)]
    loop = loop_of(groups, pipeline_depth=depth, prefill_chunk=5)
    peak = 0
    for salt, length in enumerate([1, 5, 6, 7, 18, 23]):
        loop.add(str(salt), prompt_of(length, salt), 40)
    while loop.turn():
        peak = max(peak, groups[1].pool.num_used)
    for salt, length in enumerate([1, 5, 6, 7, 18, 23]):
        assert loop.tokens(str(salt)) == solo(prompt_of(length, salt), 40, (None, 6))
    assert loop.scheduler.stats().num_preemptions == 0
    assert peak <= 20


@depths
def test_a_window_group_alone_runs_far_past_the_pool(loop_of: LoopOf, depth: int) -> None:
    loop = loop_of([make_group(6, 4, window=6)], pipeline_depth=depth, prefill_chunk=4)
    loop.add("a", prompt_of(30), 200)
    loop.run()
    assert loop.tokens("a") == solo(prompt_of(30), 200, (6,))


@depths
def test_without_groups_the_runner_keeps_the_caches(loop_of: LoopOf, depth: int) -> None:
    loop = loop_of((), pipeline_depth=depth, max_batch_size=2)
    for salt in range(5):
        loop.add(str(salt), prompt_of(3 + 9 * salt, salt), 6)
    loop.run()
    for salt in range(5):
        assert loop.tokens(str(salt)) == solo(prompt_of(3 + 9 * salt, salt), 6)
    assert sorted(loop.runner.released) == [0, 1, 2, 3, 4]


@depths
def test_a_stop_token_ends_the_request_and_is_delivered(loop_of: LoopOf, depth: int) -> None:
    expected = solo(prompt_of(5), 30)
    stop = expected[6]
    loop = loop_of([make_group(32, 4)], pipeline_depth=depth, eos_token_ids=[stop])
    loop.add("eos", prompt_of(5), 30)
    loop.add("own", prompt_of(5), 30, stop_token_ids=(expected[2],))
    loop.add("ignored", prompt_of(5), 30, ignore_eos=True)
    loop.run()
    assert loop.tokens("eos") == expected[: expected.index(stop) + 1]
    assert loop.finish_reasons("eos") == [FinishReason.STOP]
    assert loop.tokens("own") == expected[: expected.index(expected[2]) + 1]
    assert loop.tokens("ignored") == expected
    assert loop.finish_reasons("ignored") == [FinishReason.LENGTH]


def test_a_long_prompt_advances_beside_running_rows_which_never_miss_a_step(loop_of: LoopOf) -> None:
    loop = loop_of([make_group(200, 4)], prefill_chunk=8)
    loop.add("running", prompt_of(3), 200)
    while not loop.tokens("running"):
        loop.turn()
    loop.add("long", prompt_of(161), 1)
    for turn in range(20):
        before = len(loop.tokens("running"))
        loop.turn()
        assert len(loop.tokens("running")) == before + 1
        step_tokens = loop.scheduler.stats().num_prefilled_tokens
        assert step_tokens == 2 + 8 * (turn + 1)
    loop.turn()
    assert len(loop.tokens("long")) == 1
    assert loop.runner.max_prefill == 8
    loop.scheduler.abort("running")
    loop.run()


def test_a_short_prompt_does_not_wait_for_the_long_one_before_it(loop_of: LoopOf) -> None:
    loop = loop_of([make_group(200, 4)], prefill_chunk=8)
    loop.add("long", prompt_of(400), 1)
    loop.add("short", prompt_of(4), 1)
    loop.run()
    order = [event.request_id for event in loop.events]
    assert order == ["short", "long"]


@depths
def test_admission_is_first_come_first_served(loop_of: LoopOf, depth: int) -> None:
    loop = loop_of([make_group(100, 4)], pipeline_depth=depth, max_batch_size=1)
    for salt in range(6):
        loop.add(str(salt), prompt_of(4, salt), 3)
    loop.run()
    assert [event.request_id for event in loop.events if event.finish_reason] == ["0", "1", "2", "3", "4", "5"]


def test_a_deferred_request_waits_for_pages_and_nothing_is_preempted_for_it(loop_of: LoopOf) -> None:
    loop = loop_of([make_group(8, 4)])
    loop.add("first", prompt_of(20), 8)
    loop.add("second", prompt_of(20, 1), 8)
    loop.turn()
    assert loop.scheduler.stats().num_waiting == 1
    loop.run()
    assert loop.tokens("second") == solo(prompt_of(20, 1), 8)
    assert loop.scheduler.stats().num_preemptions == 0


@depths
def test_eight_pages_and_four_requests_that_need_four_each(loop_of: LoopOf, depth: int) -> None:
    loop = loop_of([make_group(8, 4)], pipeline_depth=depth)
    for salt in range(4):
        loop.add(str(salt), prompt_of(2, salt), 15)
    loop.run()
    for salt in range(4):
        assert loop.tokens(str(salt)) == solo(prompt_of(2, salt), 15)
        assert loop.finish_reasons(str(salt)) == [FinishReason.LENGTH]
    assert loop.scheduler.stats().num_preemptions <= 4


@depths
def test_a_preempted_sequence_keeps_its_tokens_and_is_never_delivered_twice(loop_of: LoopOf, depth: int) -> None:
    loop = loop_of([make_group(16, 2)], pipeline_depth=depth)
    for salt in range(4):
        loop.add(str(salt), prompt_of(1, salt), 24)
    loop.run()
    assert loop.scheduler.stats().num_preemptions > 0
    for salt in range(4):
        assert loop.tokens(str(salt)) == solo(prompt_of(1, salt), 24)


@depths
def test_the_least_progressed_gives_way_and_the_first_is_never_preempted(loop_of: LoopOf, depth: int) -> None:
    loop = loop_of([make_group(10, 2)], pipeline_depth=depth)
    loop.add("old", prompt_of(2), 17)
    for _ in range(6):
        loop.turn()
    old = loop.scheduler._sequences["old"]
    for salt in range(3):
        loop.add(f"new{salt}", prompt_of(2, salt), 14)
    while loop.turn():
        assert old.num_preemptions == 0
    assert loop.tokens("old") == solo(prompt_of(2), 17)


@depths
def test_no_row_is_computed_past_max_tokens(loop_of: LoopOf, depth: int) -> None:
    loop = loop_of([make_group(32, 4)], pipeline_depth=depth)
    for salt in range(6):
        loop.add(str(salt), prompt_of(5, salt), 3 + salt)
    loop.run()
    assert loop.runner.num_rows == sum(3 + salt for salt in range(6))


@depths
def test_ended_sequences_are_freed_without_the_collector(loop_of: LoopOf, depth: int) -> None:
    loop = loop_of([make_group(32, 4)], pipeline_depth=depth)
    gc.collect()
    gc.disable()
    try:
        for salt in range(20):
            loop.add(str(salt), prompt_of(5, salt), 4)
        loop.scheduler.abort("19")
        loop.run()
        assert not [thing for thing in gc.get_objects() if isinstance(thing, Sequence)]
    finally:
        gc.enable()


@depths
def test_max_tokens_is_clamped_to_the_context_and_to_the_pool(loop_of: LoopOf, depth: int) -> None:
    loop = loop_of([make_group(5, 4)], pipeline_depth=depth, max_context=1000)
    loop.add("pool", prompt_of(7), None)
    loop.run()
    assert loop.tokens("pool") == solo(prompt_of(7), 14)  # the last output token needs no page
    loop = loop_of([make_group(50, 4)], pipeline_depth=depth, max_context=32)
    loop.add("context", prompt_of(7), 10**12)
    loop.run()
    assert loop.tokens("context") == solo(prompt_of(7), 25)
    assert loop.finish_reasons("context") == [FinishReason.LENGTH]


def test_what_can_never_fit_is_rejected_with_both_numbers(loop_of: LoopOf) -> None:
    loop = loop_of([make_group(4, 4)], max_context=40)
    for length, limit in ((40, 40), (41, 40), (17, 16)):
        with pytest.raises(ContextLengthExceededError, match=rf"{length} tokens.*{limit} tokens.*") as caught:
            loop.add("a", prompt_of(length), 1)
        assert "context" in str(caught.value)
        assert (caught.value.num_prompt_tokens, caught.value.limit_tokens) == (length, limit)
    loop.add("fits", prompt_of(16), 5)
    loop.run()
    assert loop.tokens("fits") == solo(prompt_of(16), 1)


def test_a_token_outside_the_vocabulary_is_rejected(loop_of: LoopOf) -> None:
    with pytest.raises(InvalidRequestError, match=f"below {VOCAB_SIZE}"):
        loop_of([make_group(4, 4)]).add("a", [1, VOCAB_SIZE], 1)


def test_a_name_is_taken_only_while_its_request_is_alive(loop_of: LoopOf) -> None:
    loop = loop_of([make_group(8, 4)])
    loop.add("a", prompt_of(3), 2)
    with pytest.raises(ValueError, match="alive"):
        loop.add("a", prompt_of(3), 2)
    loop.run()
    loop.add("a", prompt_of(3), 2)
    loop.run()
    assert loop.finish_reasons("a") == [FinishReason.LENGTH] * 2


@depths
def test_zero_tokens_asked_for_are_zero_tokens(loop_of: LoopOf, depth: int) -> None:
    loop = loop_of([make_group(8, 4)], pipeline_depth=depth)
    loop.add("a", prompt_of(3), 0)
    loop.run()
    assert loop.tokens("a") == []
    assert loop.finish_reasons("a") == [FinishReason.LENGTH]


@depths
@pytest.mark.parametrize("turns", range(9))
def test_an_abort_at_any_time_frees_its_pages_and_leaves_the_neighbour_alone(
    loop_of: LoopOf, depth: int, turns: int
) -> None:
    loop = loop_of([make_group(32, 4)], pipeline_depth=depth, max_batch_size=2)
    loop.add("stays", prompt_of(4), 20)
    loop.add("goes", prompt_of(20, 1), 20)
    loop.add("queued", prompt_of(4, 2), 20)
    for _ in range(turns):
        loop.turn()
    for _ in range(2):
        loop.scheduler.abort("goes")
        loop.scheduler.abort("queued")
        loop.scheduler.abort("unknown")
    loop.run()
    assert loop.tokens("stays") == solo(prompt_of(4), 20)
    assert loop.finish_reasons("goes") == [FinishReason.ABORT]
    assert loop.finish_reasons("queued") == [FinishReason.ABORT]
    assert loop.tokens("goes") == solo(prompt_of(20, 1), 20)[: len(loop.tokens("goes"))]


def test_pages_of_an_aborted_row_stay_held_until_its_step_in_flight_has_retired(loop_of: LoopOf) -> None:
    group = make_group(32, 4)
    loop = loop_of([group], pipeline_depth=1)
    loop.add("a", prompt_of(4), 20)
    for _ in range(4):
        loop.turn()
    held = group.pool.num_used
    loop.scheduler.abort("a")
    assert group.pool.num_used == held
    assert group.plan.num_rows == 0
    loop.run()
    assert group.pool.num_used == 0


@depths
@pytest.mark.parametrize("phase", ["launch", "collect"])
@pytest.mark.parametrize("failing", range(6))
def test_a_step_that_raises_ends_its_requests_alone(loop_of: LoopOf, depth: int, phase: str, failing: int) -> None:
    def fail(at: str, step: Step) -> Exception | None:
        return RuntimeError("injected") if (at, step.step_id) == (phase, failing) else None

    loop = loop_of([make_group(32, 4)], pipeline_depth=depth, max_batch_size=2, fail=fail)
    for salt in range(5):
        loop.add(str(salt), prompt_of(6 + salt, salt), 5)
    loop.run()
    for salt in range(5):
        expected = solo(prompt_of(6 + salt, salt), 5)
        if str(salt) in loop.runner.failed:
            assert loop.finish_reasons(str(salt)) == [FinishReason.ERROR]
            assert loop.tokens(str(salt)) == expected[: len(loop.tokens(str(salt)))]
        else:
            assert loop.tokens(str(salt)) == expected
    assert loop.runner.failed
    loop.add("after", prompt_of(9), 5)
    loop.run()
    assert loop.tokens("after") == solo(prompt_of(9), 5)


def test_pages_that_somebody_else_holds_end_the_request_instead_of_blocking_the_queue(loop_of: LoopOf) -> None:
    group = make_group(8, 4)
    foreign = group.pool.acquire(6)
    loop = loop_of([group])
    loop.add("output", prompt_of(3), 20)
    loop.add("prompt", prompt_of(20, 1), 1)
    loop.run()
    assert loop.finish_reasons("output") == [FinishReason.LENGTH]
    assert loop.tokens("output") == solo(prompt_of(3), 20)[: len(loop.tokens("output"))]
    assert loop.finish_reasons("prompt") == [FinishReason.ERROR]
    group.pool.release(foreign)


def test_plans_change_only_by_what_changed(loop_of: LoopOf) -> None:
    group = make_group(64, 8)
    loop = loop_of([group], max_batch_size=2)
    loop.add("a", prompt_of(9), 40)
    loop.add("b", prompt_of(9, 1), 40)
    for _ in range(4):
        loop.turn()
    epochs: list[Any] = []
    for _ in range(8):
        before = group.plan.epoch
        loop.turn()
        epochs.append(group.plan.epoch - before)
    assert min(epochs) == 1  # advance alone
    assert max(epochs) <= 4  # advance and a page for both rows
    loop.run()


def test_steps_must_be_retired_in_order(loop_of: LoopOf) -> None:
    loop = loop_of([make_group(8, 4)])
    loop.add("a", prompt_of(3), 4)
    step = loop.scheduler.schedule()
    assert step is not None
    with pytest.raises(RuntimeError, match="in flight"):
        loop.scheduler.schedule()
    with pytest.raises(ValueError, match="not the oldest"):
        loop.scheduler.fail(Step(99), RuntimeError())
    loop.flights.append((step, loop.runner.launch(step)))
    loop.retire()
    loop.run()
    assert loop.tokens("a") == solo(prompt_of(3), 4)

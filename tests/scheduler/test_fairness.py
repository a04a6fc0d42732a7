"""Every request's wait is bounded by the work before it, whatever keeps arriving behind it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlxcel_paged.request import Request, SamplingParams
from mlxcel_paged.scheduler import Scheduler, SchedulerConfig

from .scripted import VOCAB_SIZE, Loop, ScriptedRunner, make_group, solo


class Clock:
    """One second per step."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, depth: int, **limits: Any) -> Loop:
    groups = [make_group(40, 4)]
    config = SchedulerConfig(
        max_context=160,
        vocab_size=VOCAB_SIZE,
        pipeline_depth=depth,
        **{"max_batch_size": 4, "prefill_chunk": 8} | limits,
    )
    return Loop(Scheduler(config, groups, clock=clock), ScriptedRunner(groups))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_no_request_waits_longer_than_the_work_before_it(depth: int, seed: int) -> None:
    clock, source = Clock(), random.Random(seed)
    loop = make(clock, depth)
    requests: dict[str, tuple[list[int], int]] = {}
    arrived: dict[str, float] = {}
    finished: dict[str, float] = {}
    for turn in range(600):
        clock.now = float(turn)
        if turn < 300 and turn % 4 == 0:  # more than the batch can take
            name = str(len(requests))
            is_long = len(requests) % 10 == 5
            length = source.randint(100, 140) if is_long else source.randint(1, 12)
            prompt = [source.randrange(VOCAB_SIZE) for _ in range(length)]
            requests[name] = (prompt, source.randint(1, 20))
            arrived[name] = clock.now
            loop.scheduler.add(Request(name, prompt, SamplingParams(max_tokens=requests[name][1]), clock.now))
        loop.turn()
        for event in loop.events[-40:]:
            if event.finish_reason is not None:
                finished.setdefault(event.request_id, clock.now)
    loop.run(max_turns=20_000)
    names = list(requests)
    for name, (prompt, max_tokens) in requests.items():
        assert loop.tokens(name) == solo(prompt, max_tokens)
    starts = {event.request_id: event.start for event in loop.events if event.start is not None}
    queue_s = [starts[name].queue_s for name in names]
    admitted = [arrived[name] + wait for name, wait in zip(names, queue_s, strict=True)]
    assert admitted == sorted(admitted)  # nobody is overtaken, a long prompt by short ones neither
    for index, name in enumerate(names):
        # Alone, one after the other, a sequence takes a step per chunk and per token; preempted ones run again.
        ahead = [requests[other] for other in names[:index]]
        alone_s = sum(-(-len(prompt) // 4) + max_tokens for prompt, max_tokens in ahead)
        assert queue_s[index] <= 2 * alone_s + 1, name


def test_running_rows_advance_in_every_step_and_the_prompt_within_its_budget() -> None:
    clock = Clock()
    loop = make(clock, 0, max_num_batched_tokens=7, prefill_chunk=32)
    for name in ("a", "b", "c"):
        loop.add(name, [ord(name) % 50], 24)
    loop.turn()
    loop.add("long", [5] * 60, 4)
    num_steps = 0
    while not loop.tokens("long"):
        before = {name: len(loop.tokens(name)) for name in "abc"}
        prefilled = loop.scheduler.stats().num_prefilled_tokens
        loop.turn()
        num_steps += 1
        assert {name: len(loop.tokens(name)) for name in "abc"} == {name: count + 1 for name, count in before.items()}
        assert loop.scheduler.stats().num_prefilled_tokens - prefilled <= 7 - 3
    assert num_steps == -(-59 // 4) + 1
    loop.run()


def test_a_prompt_alone_gets_the_whole_chunk() -> None:
    loop = make(Clock(), 0, max_num_batched_tokens=5, prefill_chunk=32)
    loop.add("long", [5] * 65, 2)
    loop.turn()
    assert loop.scheduler.stats().num_prefilled_tokens == 32
    loop.run()


def test_a_budget_that_a_full_batch_uses_up_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        make(Clock(), 0, max_num_batched_tokens=4)

"""Random arrivals, aborts, failures and pool sizes against one promise: every request ends once, as it does alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxcel_paged.request import ContextLengthExceededError, FinishReason
from mlxcel_paged.scheduler import Step

from .scripted import VOCAB_SIZE, Loop, make_group, make_loop, solo


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler with a scripted model over one or two KV groups, or none."""

    loop: Loop

    @initialize(
        depth=st.integers(0, 1),
        num_pages=st.integers(1, 24),
        page_size=st.integers(1, 5),
        window=st.none() | st.integers(1, 9),
        num_groups=st.integers(0, 2),
        max_batch_size=st.integers(1, 5),
        prefill_chunk=st.integers(1, 9),
        max_context=st.integers(8, 60),
        prefix_cache=st.booleans(),
    )
    def build(
        self,
        depth: int,
        num_pages: int,
        page_size: int,
        window: int | None,
        num_groups: int,
        max_batch_size: int,
        prefill_chunk: int,
        max_context: int,
        prefix_cache: bool,
    ) -> None:
        groups = [
            make_group(num_pages, page_size, window=window if index == num_groups - 1 else None)
            for index in range(num_groups)
        ]
        self.loop = make_loop(
            groups,
            max_batch_size=max_batch_size,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            pipeline_depth=depth,
            fail=self.fail,
            prefix_cache=prefix_cache,
        )
        self.windows = tuple(group.window for group in groups) or (None,)
        self.expected: dict[str, list[int]] = {}
        self.prompts: list[list[int]] = []
        self.aborted: set[str] = set()
        self.fail_next: str | None = None

    def fail(self, phase: str, _: Step) -> Exception | None:
        if phase != self.fail_next:
            return None
        self.fail_next = None
        return RuntimeError("injected")

    @rule(
        length=st.integers(1, 30),
        max_tokens=st.integers(0, 30),
        salt=st.integers(0, 10**6),
        stops=st.booleans(),
        alike=st.integers(0, 4),
    )
    def add(self, length: int, max_tokens: int, salt: int, stops: bool, alike: int) -> None:
        name = str(len(self.expected))
        source = random.Random(salt)
        prompt = [source.randrange(VOCAB_SIZE) for _ in range(length)]
        if alike < len(self.prompts):  # starts as an earlier one, perhaps to its end
            shared = self.prompts[alike]
            prompt = (shared[: source.randint(0, len(shared))] + prompt)[:30]
        self.prompts.append(prompt)
        length = len(prompt)
        stop_token_ids = tuple(source.sample(range(VOCAB_SIZE), 6)) if stops else ()
        capacity = self.loop.scheduler.groups.capacity_tokens
        room = self.loop.scheduler.config.max_context - length
        if capacity is not None:
            room = min(room, capacity - length + 1)
        try:
            self.loop.add(name, prompt, max_tokens, stop_token_ids=stop_token_ids)
        except ContextLengthExceededError:
            assert room < 1
            return
        assert room >= 1 or max_tokens == 0
        self.expected[name] = solo(prompt, min(max_tokens, room), self.windows, stop_token_ids)

    @precondition(lambda self: self.expected)
    @rule(pick=st.integers(0, 10**6))
    def abort(self, pick: int) -> None:
        name = str(pick % len(self.expected))
        if not self.loop.finish_reasons(name):
            self.aborted.add(name)
        self.loop.scheduler.abort(name)
        self.loop.events += self.loop.scheduler.take_events()

    @rule(phase=st.sampled_from(["launch", "collect"]))
    def break_next_step(self, phase: str) -> None:
        self.fail_next = phase

    @rule(turns=st.integers(1, 12))
    def run_some_turns(self, turns: int) -> None:
        for _ in range(turns):
            self.loop.turn()

    @invariant()
    def pools_and_plans_are_sound(self) -> None:
        if hasattr(self, "loop"):
            self.loop.scheduler.check_integrity()
            assert self.loop.runner.max_batch <= self.loop.scheduler.config.max_batch_size

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.fail_next = None
        self.loop.run(max_turns=self.loop.num_turns + 20_000)
        self.loop.check_drained()
        for name, expected in self.expected.items():
            reasons = self.loop.finish_reasons(name)
            assert len(reasons) == 1
            tokens = self.loop.tokens(name)
            if reasons[0] is FinishReason.ABORT:
                assert name in self.aborted
                assert tokens == expected[: len(tokens)]
            elif reasons[0] is FinishReason.ERROR:
                assert name in self.loop.runner.failed
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=500, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_a_crowd_in_a_small_pool_finishes_with_bounded_preemptions(depth: int, seed: int) -> None:
    source = random.Random(seed)
    num_pages, page_size = source.randint(6, 20), source.randint(1, 4)
    loop = make_loop([make_group(num_pages, page_size)], pipeline_depth=depth, max_batch_size=source.randint(2, 6))
    requests: dict[str, Any] = {}
    for index in range(30):
        prompt = [source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, num_pages * page_size // 2))]
        requests[str(index)] = prompt
        loop.add(str(index), prompt, num_pages * page_size - len(prompt))
    loop.run()
    for name, prompt in requests.items():
        assert loop.tokens(name) == solo(prompt, num_pages * page_size - len(prompt))
    # Each preemption of a sequence doubles the pages that must be free before it comes back.
    assert loop.scheduler.stats().num_preemptions <= 30 * (num_pages.bit_length() + 1)
    loop.check_drained()

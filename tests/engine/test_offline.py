"""Requests without a server: every prompt is answered in order, and leaving early leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from mlxcel_paged.engine import Engine
from mlxcel_paged.engine.offline import generate, stream
from mlxcel_paged.request import ContextLengthExceededError, SamplingParams
from mlxcel_paged.scheduler import Step
from scheduler.scripted import ScriptedRunner, solo

from .conftest import ABORT, check_drained, request, scripted_core

StartEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def test_offline_streams_more_requests_than_the_queue_holds(start_engine: StartEngine) -> None:
    engine = start_engine(lambda _: scripted_core(max_batch_size=2), max_queued_requests=1)
    completions = generate(engine, [[index] for index in range(20)], GREEDY)
    assert [completion.token_ids for completion in completions] == [solo([index], 12) for index in range(20)]


def test_leaving_an_offline_stream_early_aborts_the_rest(start_engine: StartEngine) -> None:
    is_left = threading.Event()

    class Waiting(ScriptedRunner):
        """Runs no second step before the stream is left."""

        def launch(self, step: Step) -> Any:
            assert step.step_id == 0 or is_left.wait(60)
            return super().launch(step)

    engine = start_engine(lambda _: scripted_core(runner_type=Waiting))
    for event in stream(engine, [request("a", [1], 150), request("b", [2], 150)]):
        assert event.finish_reason is None
        break
    is_left.set()
    check_drained(engine)
    assert {reason: count for reason, count in engine.stats().num_finished.items() if count} == {ABORT: 2}


def test_an_offline_prompt_that_cannot_be_served_aborts_the_others(start_engine: StartEngine) -> None:
    engine = start_engine(lambda _: scripted_core())
    with pytest.raises(ContextLengthExceededError):
        generate(engine, [[1], [1] * 500], GREEDY)

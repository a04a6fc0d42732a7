"""Engines over a scripted model; every test ends with a leak check."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine
from mlxcel_paged.engine.core import EngineCore, EngineModel
from mlxcel_paged.engine.storage import StorageChoice
from mlxcel_paged.request import FinishReason, Request, SamplingParams, TokenEvent
from mlxcel_paged.scheduler import Scheduler, SchedulerConfig
from scheduler.scripted import VOCAB_SIZE, ScriptedRunner, make_group


class Inbox:
    """Collects events of any number of requests; its methods wait."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self._changed = threading.Condition()

    def __call__(self, event: TokenEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, claim: Callable[[], bool], timeout_s: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(claim, timeout_s), f"never happened, events: {self.events[-5:]}"

    def finished(self, request_id: str) -> TokenEvent | None:
        endings = [event for event in self.events if event.request_id == request_id and event.finish_reason]
        assert len(endings) <= 1
        return endings[0] if endings else None

    def wait_finished(self, *request_ids: str) -> list[TokenEvent]:
        self.wait_for(lambda: all(self.finished(request_id) for request_id in request_ids))
        return [event for request_id in request_ids if (event := self.finished(request_id))]

    def tokens(self, request_id: str) -> list[int]:
        return [
            event.token_id for event in self.events if event.request_id == request_id and event.token_id is not None
        ]


def scripted_core(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    pipeline_depth: int = 0,
    max_batch_size: int = 4,
    runner_type: type[ScriptedRunner] = ScriptedRunner,
    **runner_arguments: Any,
) -> EngineCore:
    groups = [make_group(num_pages, page_size)]
    config = SchedulerConfig(
        max_batch_size=max_batch_size,
        max_context=200,
        vocab_size=VOCAB_SIZE,
        prefill_chunk=8,
        pipeline_depth=pipeline_depth,
    )
    model = EngineModel("scripted", None, VOCAB_SIZE, 200, "cpu", StorageChoice("paged", 4, "asked for"), None)
    return EngineCore(model, Scheduler(config, groups), runner_type(groups, **runner_arguments))


def request(request_id: str, prompt: list[int], max_tokens: int | None = 10, **sampling: Any) -> Request:
    return Request(request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling))


@pytest.fixture
def start_engine() -> Iterator[Callable[..., Engine]]:
    """Starts engines; at the end of the test each must be idle without holding anything, and its thread must end."""
    engines: list[Engine] = []

    def start(build: Callable[[EngineConfig], EngineCore], *, wait: bool = True, **arguments: Any) -> Engine:
        engine = Engine(EngineConfig(), build=build, **arguments)
        engines.append(engine)
        engine.start()
        if wait:
            engine.wait_until_ready(60)
        return engine

    yield start
    for engine in engines:
        check_drained(engine)
        assert engine.stop(timeout_s=60)


def check_drained(engine: Engine) -> None:
    """Waits until the engine is idle, then checks that it holds and remembers nothing."""
    if engine.state != "ready":
        return
    until = time.monotonic() + 60
    while (stats := engine.stats()).num_requests_running or stats.num_requests_waiting or stats.kv_pages_used:
        assert time.monotonic() < until, stats
        time.sleep(0.001)
    assert engine._core is not None
    scheduler = engine._core.scheduler
    assert not engine._listeners
    assert not engine._inbox
    assert not scheduler._sequences
    scheduler.check_integrity()


LENGTH, STOP, ABORT, ERROR = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR

"""A step that does not end is reported once, with the place; it makes the engine stalled and nothing else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mlxcel_paged.engine import Engine
from mlxcel_paged.engine.errors import EngineFailedError
from mlxcel_paged.scheduler import StepResult
from scheduler.scripted import ScriptedRunner, solo

from .conftest import Inbox, request, scripted_core


class Hanging(ScriptedRunner):
    def __init__(self, *arguments: Any, gate: threading.Event, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.gate = gate

    def collect(self, launch: Any) -> StepResult:
        assert self.gate.wait(60)
        return super().collect(launch)


def wait_until(claim: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_step_that_hangs_is_reported_and_may_still_end(
    start_engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    engine = start_engine(lambda _: scripted_core(runner_type=Hanging, gate=gate), step_timeout_s=0.1)
    inbox = Inbox()
    assert not engine.is_stalled
    with caplog.at_level(logging.WARNING, "mlxcel_paged"):
        engine.submit(request("a", [1, 2], 5), inbox)
        wait_until(lambda: engine.is_stalled and engine.stats().num_stalled_steps == 1)
        assert engine.stats().is_stalled
        assert engine.state == "ready"
        assert engine.stats().step_age_s > 0.1
        time.sleep(0.3)
        assert engine.stats().num_stalled_steps == 1  # once per step
        gate.set()
        inbox.wait_finished("a")
        wait_until(lambda: "has ended" in caplog.text)
    assert inbox.tokens("a") == solo([1, 2], 5)
    assert not engine.is_stalled
    assert "in collect" in caplog.text  # where the thread stood


def test_an_idle_engine_never_stalls(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(lambda _: scripted_core(), step_timeout_s=0.02)
    time.sleep(0.2)
    assert not engine.is_stalled
    assert engine.stats().num_stalled_steps == 0


def test_an_engine_that_dies_in_a_stalled_step_answers_and_leaves_no_thread(
    start_engine: Callable[..., Engine],
) -> None:
    gate = threading.Event()

    class Dying(Hanging):
        def collect(self, launch: Any) -> StepResult:
            assert self.gate.wait(60)
            raise SystemExit("killed")

    num_threads = threading.active_count()
    engine = start_engine(lambda _: scripted_core(runner_type=Dying, gate=gate), step_timeout_s=0.05)
    inbox = Inbox()
    engine.submit(request("a", [1, 2], 5), inbox)
    wait_until(lambda: engine.is_stalled)
    gate.set()
    [event] = inbox.wait_finished("a")
    assert isinstance(event.error, EngineFailedError)
    assert not engine.is_stalled
    engine.stop(timeout_s=60)
    wait_until(lambda: "mlxcel-paged-watchdog" not in {thread.name for thread in threading.enumerate()})
    assert threading.active_count() <= num_threads + 1


@pytest.mark.parametrize("timeout_s", [0, -1.0])
def test_a_timeout_must_be_positive(timeout_s: float) -> None:
    from mlxcel_paged.config import EngineConfig

    with pytest.raises(ValueError, match="step_timeout_s"):
        Engine(EngineConfig(), step_timeout_s=timeout_s)

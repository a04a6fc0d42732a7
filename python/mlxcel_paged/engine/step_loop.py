"""Runs steps: schedules, launches and retires them in order, and turns what raises into the end of its requests."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlxcel_paged._core import CorruptionError
from mlxcel_paged.engine.core import EngineCore
from mlxcel_paged.engine.step_times import StepTimes
from mlxcel_paged.request import TokenEvent
from mlxcel_paged.scheduler import Step

logger = logging.getLogger("mlxcel_paged")


@dataclass(slots=True)
class _Flight:
    """A step that was launched, or that failed to be; retired in order all the same."""

    step: Step
    launch: Any = None
    error: Exception | None = None


class StepLoop:
    """The steps of one core. The engine's thread alone uses it.

    Args:
        core: scheduler and runner.
        deliver: takes events, at once.
        times: where time and failures are booked.
    """

    def __init__(self, core: EngineCore, deliver: Callable[[list[TokenEvent]], None], times: StepTimes) -> None:
        self._core = core
        self._deliver = deliver
        self._times = times
        self._flights: deque[_Flight] = deque()

    def turn(self) -> None:
        """Launches the next step, and retires the oldest one once the pipeline is full or nothing more can start.

        Raises:
            RuntimeError: requests are alive and none can be scheduled.
            CorruptionError: page accounting is broken.
        """
        self._times.begin()
        scheduler = self._core.scheduler
        step = scheduler.schedule()
        events = scheduler.take_events()
        self._deliver(events)
        flights = self._flights
        if step is not None:
            flights.append(self._launch(step))
        if step is None and not flights and not events and scheduler.has_work:
            raise RuntimeError(f"no request can be scheduled: {scheduler.stats()}")
        # After a failed launch nothing may be scheduled whose input that step should have sampled.
        num_kept = 0 if step is None or flights[-1].error is not None else scheduler.config.pipeline_depth
        while len(flights) > num_kept:
            self._retire(flights.popleft())
        self._times.end()

    def _launch(self, step: Step) -> _Flight:
        started_at = time.perf_counter()
        try:
            return _Flight(step, launch=self._core.runner.launch(step))
        except Exception as error:
            return _Flight(step, error=error)
        finally:
            self._times.model_s += time.perf_counter() - started_at

    def _retire(self, flight: _Flight) -> None:
        """Commits a step, or ends its requests with the error that it raised."""
        scheduler = self._core.scheduler
        started_at = time.perf_counter()
        error = flight.error
        if error is None:
            try:
                result = self._core.runner.collect(flight.launch)
            except Exception as raised:
                error = raised
        self._times.model_s += time.perf_counter() - started_at
        if error is None:
            self._deliver(scheduler.commit(flight.step, result))
            return
        logger.error("step %d failed", flight.step.step_id, exc_info=error)
        self._times.num_failed += 1
        # The traceback would keep the step's arrays and pages alive for as long as the caller keeps the error.
        self._deliver(scheduler.fail(flight.step, error.with_traceback(None)))
        if isinstance(error, CorruptionError):
            raise error
        if not scheduler.has_work:
            scheduler.check_integrity()

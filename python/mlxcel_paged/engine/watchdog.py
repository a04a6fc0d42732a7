"""Notices a step that does not end: it says so in the log, with the place where the engine's thread stands."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable

from mlxcel_paged.engine.step_times import StepTimes
from mlxcel_paged.field_checks import check_seconds

logger = logging.getLogger("mlxcel_paged")

_CHECKS_PER_TIMEOUT = 8


class Watchdog:
    """Watches the steps of one engine from a thread of its own. It reports; it ends nothing.

    Args:
        times: when the present step began.
        timeout_s: how long a step may take; None watches nothing.
        thread_ident: the engine's thread, for the report.
    """

    def __init__(self, times: StepTimes, timeout_s: float | None, thread_ident: Callable[[], int | None]) -> None:
        if timeout_s is not None:
            check_seconds("step_timeout_s", timeout_s)
        self._times = times
        self._timeout_s = timeout_s
        self._thread_ident = thread_ident
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_stalled(self) -> bool:
        """Whether the present step has run beyond the timeout."""
        return self._timeout_s is not None and self._times.age_s > self._timeout_s

    def start(self) -> None:
        """Begins to watch."""
        if self._timeout_s is not None:
            self._thread = threading.Thread(target=self._run, name="mlxcel-paged-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread. A second call does nothing."""
        self._is_over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        assert self._timeout_s is not None
        reported: float | None = None
        while not self._is_over.wait(self._timeout_s / _CHECKS_PER_TIMEOUT):
            begun_at = self._times.begun_at
            if reported is not None and begun_at != reported:
                logger.warning("the step that had stalled has ended")
                reported = None
            if reported is None and begun_at is not None and self.is_stalled:
                reported = begun_at
                self._times.num_stalled += 1
                message = "a step has run for %.1f s, the step timeout is %g s; the engine's thread stands at\n%s"
                logger.error(message, self._times.age_s, self._timeout_s, self._stack())

    def _stack(self) -> str:
        ident = self._thread_ident()
        frame = None if ident is None else sys._current_frames().get(ident)
        return "(unknown)" if frame is None else "".join(traceback.format_stack(frame)).rstrip()

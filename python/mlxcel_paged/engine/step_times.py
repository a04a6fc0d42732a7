"""Where the time of steps goes, and since when the present one runs."""

from __future__ import annotations

import time


class StepTimes:
    """Sums over all steps of one engine. The engine's thread writes, any thread reads.

    Attributes:
        num_failed: steps that raised.
        busy_s: time spent on steps, model included.
        model_s: the part of busy_s inside the runner.
        begun_at: monotonic time at which the present step began; None between steps.
        num_stalled: steps that ran beyond the step timeout; the watchdog alone writes it.
    """

    def __init__(self) -> None:
        self.num_failed = 0
        self.busy_s = 0.0
        self.model_s = 0.0
        self.begun_at: float | None = None
        self.num_stalled = 0

    def begin(self) -> None:
        self.begun_at = time.monotonic()

    def end(self) -> None:
        if self.begun_at is not None:
            self.busy_s += time.monotonic() - self.begun_at
        self.begun_at = None

    @property
    def age_s(self) -> float:
        """How long the present step has run; 0 between steps."""
        begun_at = self.begun_at
        return 0.0 if begun_at is None else time.monotonic() - begun_at

"""What executes a step; the engine's only view of models and arrays."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

from mlxcel_paged.scheduler import Step, StepResult


class Runner(Protocol):
    """Executes steps. Every method runs on the thread that owns MLX.

    With pipeline_depth 0 a step may be computed by `launch` or by `collect`. With 1, `launch` only enqueues: the next
    step is launched before the last one is collected.
    """

    def launch(self, step: Step) -> Any:
        """Starts a step; returns what `collect` needs."""

    def collect(self, launch: Any) -> StepResult:
        """Waits for a launched step, in launch order."""

    def release(self, sequence_ids: Seq[int]) -> None:
        """Forgets sequences that ended or were preempted."""

    def outcomes(self) -> dict[str, int]:
        """Returns attention launches of decode steps by outcome; any thread may call it."""

    def prefill_outcomes(self) -> dict[str, int]:
        """Returns attention launches of prompt chunks by outcome; any thread may call it."""

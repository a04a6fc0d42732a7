"""The steps that were handed out and have not come back, oldest first."""

from __future__ import annotations

from collections import deque

from mlxcel_paged.scheduler.sequence import Sequence
from mlxcel_paged.scheduler.step import Step


class Flights:
    """Steps in flight; what they read or write stays allocated until they are retired."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def newest(self) -> Step | None:
        return self._steps[-1] if self._steps else None

    def push(self, step: Step) -> None:
        self._steps.append(step)

    def retire(self, step: Step) -> list[Sequence]:
        """Ends the oldest step, gives back the pages that waited for it, and returns the sequences that did.

        Raises:
            ValueError: it is not the oldest step in flight.
        """
        if not self._steps or self._steps[0] is not step:
            raise ValueError(f"step {step.step_id} is not the oldest step in flight")
        self._steps.popleft()
        step.is_retired = True
        for pool, pages in step.parting_pages:
            pool.release(pages)
        parting, step.parting, step.parting_pages = step.parting, [], []
        return parting

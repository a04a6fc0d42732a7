"""Why the resident plans changed, what each change cost, and the last changes one by one while somebody looks.

Counting is always on. Events are kept only after `enable`: then every edit reads the clock and the epoch twice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from mlxcel_paged._core import DecodePlan, Slot

_T = TypeVar("_T")

CAPACITY_EVENTS = 1024


class PlanCause(StrEnum):
    """What changed a plan besides the step that every row takes."""

    ADMIT = "admit"  # a sequence got a row
    RETIRE = "retire"  # a sequence ended, or its last token is in flight
    PREEMPT = "preempt"  # a sequence gave its pages back
    PAGE_CROSSING = "page_crossing"  # a row's next token starts a page
    COPY_ON_WRITE = "copy_on_write"  # a row got its own copy of a shared page
    HEAD_RETIRE = "head_retire"  # pages left a row's window
    RESPLIT = "resplit"  # the work list was divided anew


@dataclass(frozen=True, slots=True)
class PlanEvent:
    """One change of one group's plan.

    Attributes:
        at_s: monotonic time.
        step_id: the step that was being composed.
        group: KV group.
        cause: why.
        slot, generation: the row's slot; None for a change of the whole list.
        epoch_before, epoch_after: the plan's edit count around it.
        cost_us: time that it took.
        after: for a resplit the changes of rows that made it necessary; none where rows have outgrown the bound.
    """

    at_s: float
    step_id: int
    group: int
    cause: PlanCause
    slot: int | None
    generation: int | None
    epoch_before: int
    epoch_after: int
    cost_us: float
    after: tuple[PlanCause, ...] = ()

    def body(self) -> dict[str, Any]:
        """The event as JSON members."""
        return asdict(self)


class PlanLog:
    """Counts and, when enabled, a ring of the last events. The scheduler's thread writes, any thread reads.

    Attributes:
        counts: changes by cause since the start. A resplit is counted only while events are kept: else the kernel
            divides the list when it first needs it.
        is_enabled: whether events are kept.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: dict[PlanCause, int] = dict.fromkeys(PlanCause, 0)
        self.is_enabled = False
        self.step_id = 0
        self.num_events = 0
        self._clock = clock
        self._events: deque[PlanEvent] = deque(maxlen=CAPACITY_EVENTS)
        self._row_changes: dict[int, dict[PlanCause, None]] = {}

    def enable(self) -> None:
        """Keeps events from now on."""
        self.is_enabled = True

    def events(self) -> list[PlanEvent]:
        """The last events, oldest first; any thread may ask."""
        return list(self._events.copy())

    def edit(self, cause: PlanCause, group: int, plan: DecodePlan, slot: Slot | None, change: Callable[[], _T]) -> _T:
        """Applies one change of a row and books it.

        Args:
            slot: the row's slot; None when `change` returns it.
        """
        self.counts[cause] += 1
        if not self.is_enabled:
            return change()
        epoch, started_at = plan.epoch, time.perf_counter()
        result = change()
        cost_us = (time.perf_counter() - started_at) * 1e6
        self._row_changes.setdefault(group, {})[cause] = None
        row: Any = result if slot is None else slot
        self._keep(
            PlanEvent(self._clock(), self.step_id, group, cause, row.index, row.generation, epoch, plan.epoch, cost_us)
        )
        return result

    def resplit(self, group: int, plan: DecodePlan) -> None:
        """Divides the work list now instead of in the kernel, to see whether that was due and what it cost."""
        epoch, started_at = plan.epoch, time.perf_counter()
        if not plan.ensure_work_list():
            return
        cost_us = (time.perf_counter() - started_at) * 1e6
        self.counts[PlanCause.RESPLIT] += 1
        after = tuple(self._row_changes.pop(group, ()))
        self._keep(
            PlanEvent(
                self._clock(), self.step_id, group, PlanCause.RESPLIT, None, None, epoch, plan.epoch, cost_us, after
            )
        )

    def _keep(self, event: PlanEvent) -> None:
        self.num_events += 1
        self._events.append(event)

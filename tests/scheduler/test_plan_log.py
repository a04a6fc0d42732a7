"""Every change of a plan is booked with its cause; events are kept only on request, in a bounded ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from mlxcel_paged.scheduler.plan_log import CAPACITY_EVENTS, PlanCause, PlanLog

from .scripted import VOCAB_SIZE, Loop, make_group

LoopOf = Callable[..., Loop]


def run_some_of_everything(loop: Loop) -> None:
    for index in range(6):
        loop.add(str(index), [(index * 7 + at) % VOCAB_SIZE for at in range(5 + index)], 20)
    for _ in range(8):
        loop.turn()
    loop.scheduler.abort("1")
    loop.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_each_cause_is_seen_with_the_epochs_that_it_took(loop_of: LoopOf, depth: int) -> None:
    groups = [make_group(14, 4), make_group(14, 4, window=6)]
    loop = loop_of(groups, max_batch_size=4, pipeline_depth=depth)
    log = loop.scheduler.plan_log
    log.enable()
    run_some_of_everything(loop)
    events = log.events()
    counts = Counter(event.cause for event in events)
    for cause in set(PlanCause) - {PlanCause.COPY_ON_WRITE}:
        assert counts[cause] > 0, cause
    assert dict(counts) == {cause: count for cause, count in log.counts.items() if count}
    assert counts[PlanCause.PREEMPT] == 2 * loop.scheduler.stats().num_preemptions  # one row in each group
    for event in events:
        assert event.cost_us >= 0.0
        assert event.group in (0, 1)
        assert event.epoch_after == event.epoch_before + 1
        assert (event.slot is None) == (event.cause is PlanCause.RESPLIT)
    for group in (0, 1):
        epochs = [event.epoch_after for event in events if event.group == group]
        assert epochs == sorted(epochs)
        admitted = [(event.slot, event.generation) for event in events if is_admission(event, group)]
        assert len(set(admitted)) == len(admitted)  # a slot is reused with another generation only


def is_admission(event: Any, group: int) -> bool:
    return event.group == group and event.cause is PlanCause.ADMIT


def test_a_resplit_names_the_changes_of_rows_before_it(loop_of: LoopOf) -> None:
    loop = loop_of([make_group(64, 4)])
    loop.scheduler.plan_log.enable()
    loop.add("a", [1, 2], 3)
    loop.run()
    first = next(event for event in loop.scheduler.plan_log.events() if event.cause is PlanCause.RESPLIT)
    assert first.after == (PlanCause.ADMIT,)


def test_what_is_off_keeps_no_event_and_never_reads_the_clock(loop_of: LoopOf) -> None:
    def clock() -> float:
        raise AssertionError("the clock was read")

    loop = loop_of([make_group(14, 4)], max_batch_size=4)
    loop.scheduler.plan_log._clock = clock
    run_some_of_everything(loop)
    assert not loop.scheduler.plan_log.events()
    assert loop.scheduler.plan_log.counts[PlanCause.ADMIT] >= 6
    assert loop.scheduler.plan_log.counts[PlanCause.RESPLIT] == 0


def test_the_ring_is_bounded() -> None:
    log = PlanLog()
    log.enable()
    plan = make_group(4, 4).plan
    for _ in range(CAPACITY_EVENTS):
        slot = log.edit(PlanCause.ADMIT, 0, plan, None, lambda: plan.admit([0], 1))
        log.edit(PlanCause.RETIRE, 0, plan, slot, lambda slot=slot: plan.retire(slot))
    assert log.num_events == 2 * CAPACITY_EVENTS
    events = log.events()
    assert len(events) == CAPACITY_EVENTS
    assert events[-1].cause is PlanCause.RETIRE


def test_batches_that_look_alike_are_told_apart_by_their_slots() -> None:
    """Same lengths, same pages, same row: another sequence has another identity, and the old slot is refused."""
    from mlxcel_paged.errors import StaleSlotError

    plan = make_group(8, 4).plan
    first = plan.admit([1, 2], 5)
    before, slots = plan.identity(), plan.snapshot().slots
    plan.retire(first)
    second = plan.admit([1, 2], 5)
    assert second.index == first.index
    assert second != first
    assert plan.identity() != before
    assert plan.snapshot().slots != slots
    for use in (plan.retire, plan.row_of, lambda slot: plan.append_page(slot, 3)):
        with pytest.raises(StaleSlotError):
            use(first)
    assert plan.row_of(second) == 0

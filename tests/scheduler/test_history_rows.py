"""Rows whose next token depends on the tokens so far, rows that cannot be sampled, and log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcel_paged.request import FinishReason, Request, SamplingParams, TokenLogprobs
from mlxcel_paged.scheduler import PagedGroup, Scheduler, SchedulerConfig, Step, StepResult

from .scripted import VOCAB_SIZE, make_group


def start(*sampling: dict[str, Any], pipeline_depth: int = 1) -> tuple[Scheduler, PagedGroup]:
    group = make_group(32, 4)
    config = SchedulerConfig(
        max_batch_size=4, max_context=64, vocab_size=VOCAB_SIZE, pipeline_depth=pipeline_depth, prefill_chunk=64
    )
    scheduler = Scheduler(config, [group])
    for index, fields in enumerate(sampling):
        scheduler.add(Request(f"r{index}", [1, 2, 3], SamplingParams(temperature=0.0, **fields)))
    return scheduler, group


def result(step: Step, **fields: Any) -> StepResult:
    return StepResult([5] * len(step.decode), **fields)


def test_no_step_with_a_row_that_needs_history_starts_before_the_former_has_retired() -> None:
    scheduler, _ = start({"max_tokens": 4, "presence_penalty": 1.0}, {"max_tokens": 12})
    in_flight: list[Step] = []
    num_tokens: dict[str, int] = {"r0": 0, "r1": 0}
    num_overlapped = num_waits = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        if step is None:
            assert in_flight, "nothing runs and nothing can be scheduled"
            num_waits += 1
        else:
            for row in step.decode:
                if row.sampling.needs_history:
                    assert row.token_id is not None
                    assert row.sequence.num_generated_tokens == row.sample_index
                else:
                    num_overlapped += row.token_id is None
            in_flight.append(step)
        while len(in_flight) > (0 if step is None else 1):
            for event in scheduler.commit(in_flight[0], result(in_flight.pop(0))):
                num_tokens[event.request_id] += event.token_id is not None
    assert num_tokens == {"r0": 4, "r1": 12}
    assert num_waits >= 3  # between the four tokens of r0
    assert num_overlapped >= 6  # r1 is pipelined again once r0 has ended


@pytest.mark.parametrize("pipeline_depth", [0, 1])
def test_a_row_that_cannot_be_sampled_ends_alone(pipeline_depth: int) -> None:
    scheduler, group = start({"max_tokens": 3}, {"max_tokens": 3}, pipeline_depth=pipeline_depth)
    error = RuntimeError("the grammar is too complex")
    prefill = scheduler.schedule()
    assert not prefill.decode
    scheduler.commit(prefill, result(prefill))
    step = scheduler.schedule()
    assert [row.sequence.request_id for row in step.decode] == ["r0", "r1"]
    first, second = scheduler.commit(step, result(step, failures={0: error}))
    assert (first.request_id, first.token_id, first.finish_reason, first.error) == (
        "r0", None, FinishReason.ERROR, error,
    )  # fmt: skip
    assert (second.request_id, second.token_id, second.finish_reason) == ("r1", 5, None)
    while scheduler.has_work:
        step = scheduler.schedule()
        assert [row.sequence.request_id for row in step.decode] == ["r1"]
        scheduler.commit(step, result(step))
    assert group.pool.num_used == 0


def test_log_probabilities_reach_the_events_of_their_rows_alone() -> None:
    scheduler, _ = start({"max_tokens": 2}, {"max_tokens": 2, "num_logprobs": 0}, pipeline_depth=0)
    given = [TokenLogprobs(-0.5), TokenLogprobs(-1.5, ((7, -0.1),))]
    seen = []
    while scheduler.has_work:
        step = scheduler.schedule()
        logprobs = [None, given[len(seen) // 2]] if step.decode else None
        events = scheduler.commit(step, result(step, logprobs=logprobs))
        seen += events
    assert [(event.request_id, event.logprobs) for event in seen] == [
        ("r0", None), ("r1", given[0]), ("r0", None), ("r1", given[1]),
    ]  # fmt: skip


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    scheduler, _ = start()
    with pytest.raises(ValueError, match="logit_bias"):
        scheduler.add(Request("r", [1], SamplingParams(logit_bias={VOCAB_SIZE: 1.0})))  # type: ignore[arg-type]

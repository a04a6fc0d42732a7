"""The engine's numbers for other threads: metrics, status pages, tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from mlxcel_paged.request import FinishReason


class EngineState(StrEnum):
    """Life of an engine."""

    LOADING = "loading"
    READY = "ready"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; counters only grow.

    Attributes:
        kv_pages_used: pages held, all KV groups together; 0 when nothing runs.
        num_prompt_tokens: prompt tokens of admitted requests.
        num_prefilled_tokens: tokens prefilled, recomputation included.
        num_generated_tokens: tokens delivered.
        num_finished: requests ended, by reason.
        num_failed_steps: steps that raised.
        decode_launches: attention launches of decode steps, one per layer and step, by outcome.
        busy_s: time spent on steps, model included.
        model_s: the part of busy_s inside the runner.
        step_age_s: how long the step being computed has run; 0 between steps.
        oldest_wait_s: how long the head of the queue has waited.
    """

    state: EngineState
    num_requests_running: int
    num_requests_waiting: int
    kv_pages_used: int
    kv_pages_total: int
    num_preemptions: int
    num_prompt_tokens: int
    num_prefilled_tokens: int
    num_generated_tokens: int
    num_finished: Mapping[FinishReason, int]
    num_steps: int
    num_failed_steps: int
    decode_launches: Mapping[str, int]
    busy_s: float
    model_s: float
    step_age_s: float
    oldest_wait_s: float

"""The engine's numbers for other threads: metrics, status pages, tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from mlxcel_paged.engine.kv_stats import KVCacheStats, kv_stats
from mlxcel_paged.engine.memory import MemoryPlan
from mlxcel_paged.engine.step_times import StepTimes
from mlxcel_paged.request import FinishReason
from mlxcel_paged.scheduler import SchedulerStats


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
        num_queued_tokens: prompt tokens of the requests that wait.
        kv: pages and bytes.
        kv_pages_used: pages held by sequences, all KV groups together; 0 when nothing runs.
        num_prompt_tokens: prompt tokens of admitted requests.
        num_prefilled_tokens: tokens prefilled, recomputation included.
        num_generated_tokens: tokens delivered.
        num_finished: requests ended, by reason.
        num_failed_steps: steps that raised.
        num_stalled_steps: steps that ran beyond the step timeout.
        decode_launches: attention launches of decode steps, one per layer and step, by outcome.
        prefill_launches: attention launches of prompt chunks, one per layer and chunk, by outcome.
        plan_changes: changes of the decode plans, by cause.
        memory_bytes: what MLX holds, by kind: active, cache, peak.
        busy_s: time spent on steps, model included.
        model_s: the part of busy_s inside the runner.
        step_age_s: how long the step being computed has run; 0 between steps.
        is_stalled: whether that is beyond the step timeout.
        oldest_wait_s: how long the head of the queue has waited.
    """

    state: EngineState
    num_requests_running: int
    num_requests_waiting: int
    num_queued_tokens: int
    kv: KVCacheStats
    kv_pages_used: int
    kv_pages_total: int
    num_preemptions: int
    num_prompt_tokens: int
    num_prefilled_tokens: int
    num_generated_tokens: int
    num_finished: Mapping[FinishReason, int]
    num_steps: int
    num_failed_steps: int
    num_stalled_steps: int
    decode_launches: Mapping[str, int]
    prefill_launches: Mapping[str, int]
    plan_changes: Mapping[str, int]
    memory_bytes: Mapping[str, int]
    busy_s: float
    model_s: float
    step_age_s: float
    is_stalled: bool
    oldest_wait_s: float


@dataclass(frozen=True, slots=True)
class CoreStats:
    """The part of the numbers that comes from a core, kept when the core is gone."""

    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    memory: MemoryPlan | None = None
    decode_launches: Mapping[str, int] = field(default_factory=dict)
    prefill_launches: Mapping[str, int] = field(default_factory=dict)
    plan_changes: Mapping[str, int] = field(default_factory=dict)

    def without_holdings(self) -> CoreStats:
        """The counters alone."""
        nothing: tuple[int, ...] = (0,) * len(self.scheduler.num_pages)
        scheduler = replace(
            self.scheduler,
            num_running=0,
            num_waiting=0,
            num_waiting_tokens=0,
            num_pages_used=nothing,
            num_pages_cached=nothing,
            num_pages_reserved=nothing,
            oldest_wait_s=0.0,
        )
        return replace(self, scheduler=scheduler)


def engine_stats(
    core: CoreStats,
    times: StepTimes,
    *,
    state: EngineState,
    num_inbox_requests: int,
    num_inbox_tokens: int,
    memory_bytes: Mapping[str, int],
    is_stalled: bool,
) -> EngineStats:
    """Puts a snapshot together."""
    scheduler = core.scheduler
    kv = kv_stats(core.memory, scheduler)
    return EngineStats(
        state=state,
        num_requests_running=scheduler.num_running,
        num_requests_waiting=scheduler.num_waiting + num_inbox_requests,
        num_queued_tokens=scheduler.num_waiting_tokens + num_inbox_tokens,
        kv=kv,
        kv_pages_used=kv.total("num_used"),
        kv_pages_total=kv.total("num_pages"),
        num_preemptions=scheduler.num_preemptions,
        num_prompt_tokens=scheduler.num_prompt_tokens,
        num_prefilled_tokens=scheduler.num_prefilled_tokens,
        num_generated_tokens=scheduler.num_generated_tokens,
        num_finished=scheduler.num_finished,
        num_steps=scheduler.num_steps,
        num_failed_steps=times.num_failed,
        num_stalled_steps=times.num_stalled,
        decode_launches=core.decode_launches,
        prefill_launches=core.prefill_launches,
        plan_changes=core.plan_changes,
        memory_bytes=memory_bytes,
        busy_s=times.busy_s,
        model_s=times.model_s,
        step_age_s=times.age_s,
        is_stalled=is_stalled,
        oldest_wait_s=scheduler.oldest_wait_s,
    )

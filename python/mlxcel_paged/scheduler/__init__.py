"""Continuous batching without MLX: what runs in which step, and which pages it holds.

| module | decides |
|---|---|
| `scheduler` | the life of a sequence: admit, step, commit, finish |
| `sequence` | one request's tokens, status and holdings |
| `step` | what a step computes |
| `groups` | pages and plan slots, in every KV group together |
| `admission` | admit, defer, reject |
| `estimate` | pages for tokens, the one formula |
| `prefill` | who gets the step's chunk budget |
| `preempt` | who gives way |
| `prefix_cache` | which computed pages are kept for prompts that start alike |
| `plan_log` | what is remembered about changes of the plans |
| `flights` | what stays allocated while steps run |
| `queue` | who waits, in which order |
"""

from mlxcel_paged.scheduler.config import SchedulerConfig
from mlxcel_paged.scheduler.groups import PagedGroup
from mlxcel_paged.scheduler.scheduler import Scheduler
from mlxcel_paged.scheduler.stats import SchedulerStats
from mlxcel_paged.scheduler.step import DecodeRow, PageCopy, PrefillChunk, Step, StepResult

__all__ = [
    "DecodeRow",
    "PageCopy",
    "PagedGroup",
    "PrefillChunk",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "Step",
    "StepResult",
]

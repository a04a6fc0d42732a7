"""Numbers that other threads may read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlxcel_paged.request import FinishReason


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot; counters only grow.

    Attributes:
        num_running: sequences that hold pages or caches.
        num_waiting: sequences in the queue, preempted ones included.
        num_waiting_tokens: tokens of the sequences in the queue.
        num_pages_used: pages held by sequences, per KV group.
        num_pages_cached: pages held by the prefix cache alone, per KV group.
        num_pages_reserved: free pages that admitted prompts still need, per KV group.
        num_pages_peak: most pages ever held at a time, per KV group.
        num_pages: pages of the pool, per KV group.
        num_prefix_queries: prompt tokens that the prefix cache was asked for.
        num_prefix_hits: of those, tokens that it had.
        num_evicted_pages: cached pages given up for somebody else.
        oldest_wait_s: seconds that the head of the queue has waited since it arrived.
        num_finished: requests ended, by reason.
        num_prompt_tokens: prompt tokens of admitted requests, counted once.
        num_prefilled_tokens: tokens prefilled, recomputation after preemption included.
        num_generated_tokens: tokens delivered.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_pages_used: tuple[int, ...] = ()
    num_pages_cached: tuple[int, ...] = ()
    num_pages_reserved: tuple[int, ...] = ()
    num_pages_peak: tuple[int, ...] = ()
    num_pages: tuple[int, ...] = ()
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_evicted_pages: int = 0
    oldest_wait_s: float = 0.0
    num_preemptions: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    num_prompt_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0


class SchedulerCounters:
    """Counters of one scheduler; its thread alone writes them."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self.num_finished = dict.fromkeys(FinishReason, 0)
        self.num_prompt_tokens = 0
        self.num_prefilled_tokens = 0
        self.num_generated_tokens = 0
        self.num_steps = 0

    def snapshot(self, **state: Any) -> SchedulerStats:
        """Counters together with the present `state`: the other members of `SchedulerStats`."""
        return SchedulerStats(
            **state,
            num_preemptions=self.num_preemptions,
            num_finished=dict(self.num_finished),
            num_prompt_tokens=self.num_prompt_tokens,
            num_prefilled_tokens=self.num_prefilled_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_steps=self.num_steps,
        )

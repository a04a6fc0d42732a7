"""The KV pages as `/v1/cache/stats` and `/metrics` show them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mlxcel_paged.engine.memory import MemoryPlan
from mlxcel_paged.scheduler import SchedulerStats


@dataclass(frozen=True, slots=True)
class KVGroupStats:
    """Pages of one KV group; `num_used + num_cached + num_free` are all of them.

    Attributes:
        num_pages: pages of the pool.
        num_used: held by sequences.
        num_cached: held by the prefix cache alone; they are given up when somebody needs them.
        num_free: held by nobody.
        num_reserved: of the free ones, how many admitted prompts still need.
        num_peak: most that were ever held at a time, cached ones included.
    """

    num_pages: int
    num_used: int
    num_cached: int
    num_free: int
    num_reserved: int
    num_peak: int


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    """All KV groups and the budget that they come from; budget and bytes are 0 where nothing is paged.

    Attributes:
        budget_bytes: what pages and workspace were planned within.
        is_auto_budget: whether it was derived from the memory that was free.
        workspace_bytes: reserved for the kernels' partial results.
        pool_bytes: bytes of all pages, used or not.
        groups: pages per KV group.
        num_prefix_queries: prompt tokens that the prefix cache was asked for.
        num_prefix_hits: of those, tokens that it had.
        num_evicted_pages: cached pages given up.
    """

    budget_bytes: int
    is_auto_budget: bool
    workspace_bytes: int
    pool_bytes: int
    groups: tuple[KVGroupStats, ...]
    num_prefix_queries: int
    num_prefix_hits: int
    num_evicted_pages: int

    def total(self, name: str) -> int:
        """Sum of one member over all groups."""
        return sum(getattr(group, name) for group in self.groups)

    def body(self) -> dict[str, Any]:
        """As JSON members."""
        return asdict(self)


def kv_stats(memory: MemoryPlan | None, scheduler: SchedulerStats) -> KVCacheStats:
    """Puts together what was planned and what is held.

    Args:
        memory: None with dense storage.
        scheduler: a snapshot.
    """
    members = zip(
        scheduler.num_pages,
        scheduler.num_pages_used,
        scheduler.num_pages_cached,
        scheduler.num_pages_reserved,
        scheduler.num_pages_peak,
        strict=True,
    )
    return KVCacheStats(
        budget_bytes=memory.budget_bytes if memory else 0,
        is_auto_budget=memory is not None and memory.is_auto,
        workspace_bytes=memory.workspace_bytes if memory else 0,
        pool_bytes=memory.pool_bytes if memory else 0,
        groups=tuple(
            KVGroupStats(pages, used, cached, pages - used - cached, reserved, peak)
            for pages, used, cached, reserved, peak in members
        ),
        num_prefix_queries=scheduler.num_prefix_queries,
        num_prefix_hits=scheduler.num_prefix_hits,
        num_evicted_pages=scheduler.num_evicted_pages,
    )

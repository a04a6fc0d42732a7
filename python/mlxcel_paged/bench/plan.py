"""Times the host's plan updates: the whole cost of paging that a steady decode step pays on the CPU side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mlxcel_paged import _core
from mlxcel_paged.bench.environment import environment

BATCHES = (1, 4, 16, 64, 256, 1024)
CONTEXTS = (1024, 16 * 1024, 128 * 1024)


def bench_plan(
    *,
    page_size: int,
    batches: Iterable[int] = BATCHES,
    contexts: Iterable[int] = CONTEXTS,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures `DecodePlan` updates over a grid of batch and context (tokens).

    Returns:
        `{"environment": ..., "cases": [{"batch", "context", "page_size", "advance_ns", "crossing_one_ns",
        "crossing_all_ns", "rebuild_ns"}]}`, medians in nanoseconds for one step of the whole batch.
    """
    cases = []
    for batch in batches:
        for context in contexts:
            progress(f"batch {batch}, context {context}")
            shape = {"batch": batch, "context": context, "page_size": page_size}
            cases.append({**shape, **_core.bench_plan(batch, context, page_size)})
    return {"environment": environment(), "cases": cases}

"""Runs every workload on every arm, the arms taking turns, and tells what may not be believed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from mlxcel_paged.bench.environment import environment
from mlxcel_paged.bench.serve.record import RequestRecord
from mlxcel_paged.bench.serve.servers import Servers
from mlxcel_paged.bench.serve.summary import arm_ratios, notes, problems, summarize
from mlxcel_paged.bench.serve.turn import Endpoint, Turn, WarmUp, run_turn
from mlxcel_paged.bench.serve.workload import Workload


def bench_serve(
    servers: Servers,
    workloads: Sequence[Workload],
    *,
    arms: Sequence[str],
    alternations: int,
    endpoint: Callable[[str], Endpoint],
    warm_up: WarmUp,
    goodput_ms: Mapping[str, float],
    check_tokens: bool,
    allow_failures: bool,
    progress: bool = True,
) -> dict[str, Any]:
    """Measures servers.

    Args:
        servers: where the arms' servers are.
        workloads: measured one after the other.
        arms: take turns within a workload; each alternation begins with another one.
        alternations: turns of every arm.
        endpoint: from the URL of a server to how it is talked to.
        warm_up: what a server answers first; the shapes of every workload are warmed up once on every server.
        goodput_ms: see `serving_metrics`.
        check_tokens: count it as a problem when an answer differs between arms.
        allow_failures: do not count failed requests as a problem.
        progress: show a progress bar on a terminal.

    Returns:
        `{"environment", "model", "results", "ratios", "notes", "problems"}`. A result is one workload on one arm: the
        keys of `serving_metrics` over all turns, `decode_throughput` (the median turn's), the path taken, and the same
        for each of its `turns`. The measurement holds if `problems` is empty.

    Raises:
        ServerStartError, ServerLostError: a server does not start or does not answer.
    """
    results: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    found: list[str] = []
    noted: list[str] = []
    model: str | None = None
    num_requests = sum(workload.num_requests for workload in workloads) * len(arms) * alternations
    # disable=None: no bar where standard error is no terminal.
    with tqdm(total=num_requests, unit="req", disable=None if progress else True) as bar:
        for workload in workloads:
            turns: list[Turn] = []
            warmed: set[str] = set()
            for number in range(1, alternations + 1):
                for arm in _rotated(arms, number - 1):
                    bar.set_description(f"{workload.name}, turn {number} of {alternations}, {arm}")
                    with servers.of(arm) as (url, is_new):
                        turn = asyncio.run(
                            run_turn(
                                endpoint(url),
                                workload,
                                arm=arm,
                                number=number,
                                warm_up=warm_up if is_new or arm not in warmed else None,
                                on_done=lambda record: _show(bar, record),
                            )
                        )
                    warmed.add(arm)
                    model = turn.model or model
                    turns.append(turn)
            results += [summarize(workload, arm, turns, goodput_ms) for arm in arms]
            ratios += arm_ratios(workload, arms, turns)
            noted += notes(workload, arms, turns)
            found += problems(workload, arms, turns, check_tokens=check_tokens, allow_failures=allow_failures)
    return {
        "environment": environment(),
        "model": model,
        "results": results,
        "ratios": ratios,
        "notes": noted,
        "problems": found,
    }


def _rotated(arms: Sequence[str], by: int) -> list[str]:
    """No arm always follows the same one, nor is always the first after a pause."""
    shift = by % len(arms)
    return [*arms[shift:], *arms[:shift]]


def _show(bar: Any, record: RequestRecord) -> None:
    bar.update()
    if record.error is not None:
        bar.write(f"a request failed: {record.error}")

"""Sends the requests of a turn at their times and within the number of clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from mlxcel_paged.bench.serve.client import complete
from mlxcel_paged.bench.serve.record import BenchRequest, RequestRecord


async def send_all(
    client: httpx.AsyncClient,
    requests: Sequence[BenchRequest],
    *,
    max_concurrency: int | None,
    model: str | None = None,
    on_done: Callable[[RequestRecord], None] = lambda _: None,
) -> tuple[list[RequestRecord], float]:
    """Sends every request and waits for the answers.

    Args:
        client: of the server.
        requests: in order of arrival.
        max_concurrency: requests in flight at most; one whose time has come waits for a free client, and its latency
            starts when it is sent, as in vLLM's benchmark. None is no bound.
        model: the name to ask for, where the server wants one.
        on_done: called with each answer.

    Returns:
        The records in the order of `requests`, and the seconds from the start to the last answer.
    """
    free = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    started_at = time.perf_counter()

    async def one(request: BenchRequest) -> RequestRecord:
        await asyncio.sleep(max(0.0, started_at + request.arrival_s - time.perf_counter()))
        if free is None:
            record = await complete(client, request, model)
        else:
            async with free:
                record = await complete(client, request, model)
        on_done(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) for request in requests]
    return [task.result() for task in tasks], time.perf_counter() - started_at

"""One turn: the requests of a workload on one arm's server, with its launches counted before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import httpx

from mlxcel_paged.bench.serve.arms import is_own_path
from mlxcel_paged.bench.serve.client import new_client
from mlxcel_paged.bench.serve.load import send_all
from mlxcel_paged.bench.serve.record import RequestRecord
from mlxcel_paged.bench.serve.scrape import ServerCounts, ServerLostError, scrape_counts, scrape_model
from mlxcel_paged.bench.serve.workload import Workload

_WARM_UP_OUTPUT_LEN = 8


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Requests that a server answers first, uncounted.

    Attributes:
        num_requests: how many; None sends as many as the workload has clients.
        max_prompt_tokens: prompts are cut to this many tokens.
    """

    num_requests: int | None = None
    max_prompt_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How a server is talked to.

    Attributes:
        url: without `/v1`.
        api_key: sent with every request, or None.
        vocab_size: overrides what the server says.
        ask_by_name: name the model in requests, as other servers want it.
    """

    url: str
    api_key: str | None = None
    vocab_size: int | None = None
    ask_by_name: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """The outcome of one turn.

    Attributes:
        arm: whose turn it was.
        number: from 1; turns of equal number have equal requests on every arm.
        model: the name that the server has for it.
        records: in the order of the workload's requests.
        duration_s: from the first request to the last answer.
        counts: what the server counted during the turn; None where it has no such metrics.
        on_own_path: whether all of them took the arm's path.
    """

    arm: str
    number: int
    model: str | None
    records: list[RequestRecord]
    duration_s: float
    counts: ServerCounts | None
    on_own_path: bool


async def run_turn(
    endpoint: Endpoint,
    workload: Workload,
    *,
    arm: str,
    number: int,
    warm_up: WarmUp | None,
    on_done: Callable[[RequestRecord], None],
) -> Turn:
    """Runs a turn; failed requests are in its records.

    Args:
        endpoint: the server.
        workload: what is sent.
        arm, number: see `Turn`.
        warm_up: what is sent before; None sends nothing.
        on_done: called with each counted answer.

    Raises:
        ServerLostError: the server does not answer outside the requests either, or the size of its vocabulary is not
            known.
    """
    try:
        async with new_client(endpoint.url, endpoint.api_key) as client:
            name, served_vocab_size = await scrape_model(client)
            vocab_size = endpoint.vocab_size or served_vocab_size
            if vocab_size is None:
                raise ServerLostError(
                    f"the server at {endpoint.url} does not say how large its vocabulary is (hint: --vocab-size)"
                )
            asked = name if endpoint.ask_by_name else None
            if warm_up is not None:
                await _warm_up(client, workload, warm_up, vocab_size, asked)
            requests = workload.requests(number, vocab_size)
            before = await scrape_counts(client)
            records, duration_s = await send_all(
                client, requests, max_concurrency=workload.clients, model=asked, on_done=on_done
            )
            after = await scrape_counts(client)
    except httpx.HTTPError as error:
        message = f"the server of arm {arm} at {endpoint.url} does not answer: {type(error).__name__}: {error}"
        raise ServerLostError(message) from error
    if before is None or after is None:
        return Turn(arm, number, name, records, duration_s, None, is_own_path(arm, {}, num_pages=0))
    counts = after.since(before)
    on_own_path = is_own_path(arm, counts.decode_launches, num_pages=counts.num_pages)
    return Turn(arm, number, name, records, duration_s, counts, on_own_path)


async def _warm_up(
    client: httpx.AsyncClient, workload: Workload, warm_up: WarmUp, vocab_size: int, model: str | None
) -> None:
    num_requests = warm_up.num_requests if warm_up.num_requests is not None else workload.clients or 1
    requests = [
        replace(
            request,
            prompt_token_ids=request.prompt_token_ids[: warm_up.max_prompt_tokens],
            output_len=min(request.output_len, _WARM_UP_OUTPUT_LEN),
            arrival_s=0.0,
        )
        for request in workload.requests(0, vocab_size)[:num_requests]
    ]
    await send_all(client, requests, max_concurrency=workload.clients, model=model)

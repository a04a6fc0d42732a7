"""Synchronous generation over an engine, for the command line and tests."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from mlxcel_paged.engine.engine import Engine
from mlxcel_paged.request import FinishReason, QueueFullError, Request, SamplingParams, TokenEvent

_numbers = itertools.count()


@dataclass(slots=True)
class Completion:
    """What one prompt was continued with.

    Attributes:
        token_ids: generated tokens; a stop token that ended it is the last one.
        finish_reason: why it ended.
        error: set with ERROR.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None


def stream(engine: Engine, requests: Iterable[Request]) -> Iterator[TokenEvent]:
    """Runs requests together and yields their events as they come. Leaving the loop early aborts what is alive.

    Requests beyond what the engine queues are held back here until others have ended.

    Raises:
        InvalidRequestError: a request can never be served; the others are aborted.
        EngineNotReadyError, EngineFailedError: the engine takes no requests.
    """
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    waiting = list(requests)
    waiting.reverse()
    alive: set[str] = set()
    try:
        while waiting or alive:
            while waiting:
                request = waiting[-1]
                try:
                    engine.submit(request, events.put)
                except QueueFullError:
                    if not alive:
                        raise
                    break
                alive.add(request.request_id)
                waiting.pop()
            event = events.get()
            if event.finish_reason is not None:
                alive.discard(event.request_id)
            yield event
    finally:
        for request_id in alive:
            engine.abort(request_id)


def generate(
    engine: Engine, prompts: Iterable[Seq[int]], sampling: SamplingParams | Seq[SamplingParams]
) -> list[Completion]:
    """Continues all prompts together and returns when all have ended, in the order given.

    Args:
        engine: a ready engine.
        prompts: token ids per prompt.
        sampling: for all prompts, or one per prompt.

    Raises:
        InvalidRequestError: a prompt can never be served.
    """
    token_ids = [list(prompt) for prompt in prompts]
    each = [sampling] * len(token_ids) if isinstance(sampling, SamplingParams) else list(sampling)
    call = next(_numbers)
    requests = [
        Request(f"offline-{call}-{index}", prompt, chosen)
        for index, (prompt, chosen) in enumerate(zip(token_ids, each, strict=True))
    ]
    completions = {request.request_id: Completion() for request in requests}
    for event in stream(engine, requests):
        completion = completions[event.request_id]
        if event.token_id is not None:
            completion.token_ids.append(event.token_id)
        completion.finish_reason, completion.error = event.finish_reason, event.error
    return list(completions.values())

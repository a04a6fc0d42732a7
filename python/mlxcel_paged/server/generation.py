"""The sequences of one HTTP request, from submit to finish: the bridge between the engine's thread and the event loop.

Events of all sequences of the request share one queue, which holds at most the tokens that were asked for. Whatever
happens to the request, leaving the `with` block aborts what still runs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from mlxcel_paged.engine.errors import EngineFailedError, EngineNotReadyError
from mlxcel_paged.request import FinishReason, InvalidRequestError, Request, SamplingParams, TokenEvent
from mlxcel_paged.server.errors import ApiError, aborted, engine_failed
from mlxcel_paged.server.limits import too_many_requests
from mlxcel_paged.server.service import Service
from mlxcel_paged.text.sequence_text import TOOL_CALLS, SequenceText
from mlxcel_paged.text.token_spelling import TokenReport
from mlxcel_paged.text.tool_calls import ToolCallDelta, ToolCallParser

logger = logging.getLogger("mlxcel_paged.server")


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one sequence; the last one of a sequence has its finish reason.

    Attributes:
        index: of the sequence: prompts in order, the answers to one prompt next to each other.
        text: content.
        finish_reason: `stop`, `length` or `tool_calls`.
        calls: pieces of tool calls.
        reports: one per token since the last delta, where log-probabilities were asked for.
    """

    index: int
    text: str
    finish_reason: str | None
    calls: Sequence[ToolCallDelta] = ()
    reports: Sequence[TokenReport] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole request, over all its sequences."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        body: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
        }
        if self.num_cached_tokens:
            body["prompt_tokens_details"] = {"cached_tokens": self.num_cached_tokens}
        return body


class Generation:
    """Runs prompts and gives their deltas in the order in which they come.

    Args:
        service: the server's shared state.
        call_id: unique name of the HTTP request.
        prompts: token ids of each prompt.
        samplings: how each of the answers to a prompt is sampled.
        stops: stop strings, matched on text.
        new_tool_calls: makes the parser of one answer's tool calls; None where there are none.
        arrival_time: monotonic time at which the request was read.
        prompt_param: the field that the prompts came from, for errors.
    """

    def __init__(
        self,
        service: Service,
        call_id: str,
        prompts: Sequence[list[int]],
        samplings: Sequence[SamplingParams],
        stops: Sequence[str],
        new_tool_calls: Callable[[], ToolCallParser] | None,
        arrival_time: float,
        prompt_param: str,
    ) -> None:
        self._service = service
        self._num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._requests = [
            Request(f"{call_id}-{index}", prompt, sampling, arrival_time)
            for index, (prompt, sampling) in enumerate(itertools.product(prompts, samplings))
        ]
        self._prompt_param = prompt_param
        text = service.text()
        self._texts = [
            SequenceText(
                text.detokenizers.new(),
                stops,
                spelling=text.detokenizers.spelling,
                tool_calls=None if new_tool_calls is None else new_tool_calls(),
            )
            for _ in self._requests
        ]
        self._index_of = {request.request_id: index for index, request in enumerate(self._requests)}
        self._open: set[int] = set()
        self._num_choices = len(samplings)
        self._first_token_time: list[float | None] = [None] * len(self._requests)
        self._last_token_time: list[float | None] = [None] * len(self._requests)
        self._num_cached_tokens = [0] * len(self._requests)
        self._events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    @property
    def is_done(self) -> bool:
        """Whether every sequence has ended."""
        return not self._open

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        num_completion_tokens = sum(text.num_tokens for text in self._texts)
        # As the prompt tokens: every prompt once, as its first answer found it.
        num_cached_tokens = sum(self._num_cached_tokens[:: self._num_choices])
        return Usage(self._num_prompt_tokens, num_completion_tokens, num_cached_tokens)

    def __enter__(self) -> Self:
        """Submits every sequence, or none.

        Raises:
            ApiError: the engine refused one.
        """
        self._service.enter(self)
        try:
            self._service.engine.submit_many(self._requests, self._on_event)
        except Exception as error:
            self._service.leave(self)
            raise self._refusal(error) from error
        self._open.update(range(len(self._requests)))
        self._service.metrics.prompt_tokens.inc(self._num_prompt_tokens)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._service.leave(self)
        why = "sibling_failed" if kind is not None and issubclass(kind, ApiError) else "client_left"
        for index in list(self._open):
            self._close(index, FinishReason.ABORT.value)
            self._service.metrics.aborted(why)
            self._service.engine.abort(self._requests[index].request_id)

    def abort(self) -> int:
        """Withdraws what runs and returns how many sequences that is; each is answered as aborted."""
        for index in self._open:
            self._service.engine.abort(self._requests[index].request_id)
        return len(self._open)

    async def next_delta(self, timeout_s: float) -> Delta | None:
        """The next piece of text or finish of any sequence; None when nothing came for `timeout_s` seconds.

        Raises:
            ApiError: a sequence failed, or the engine died.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    delta = self._take(await self._events.get())
                    if delta is not None:
                        return delta
        except TimeoutError:
            self._service.require_engine()
            return None

    def _on_event(self, event: TokenEvent) -> None:
        """Called from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            logger.debug("event after the server's loop has closed: %s", event.request_id)

    def _take(self, event: TokenEvent) -> Delta | None:
        index = self._index_of[event.request_id]
        if index not in self._open:
            return None  # generated before the engine saw that its stop string had come
        if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._close(index, event.finish_reason.value)
            if event.finish_reason is FinishReason.ABORT:
                self._service.metrics.aborted("shutdown")
            raise self._failure(event)
        if event.token_id is not None:
            self._observe_token(index, event)
        sequence = self._texts[index]
        new = sequence.take(event)
        if sequence.finish_reason is not None:
            self._close(index, sequence.finish_reason)
            if event.finish_reason is None:
                self._service.engine.abort(event.request_id, FinishReason.STOP)
        elif not (new.content or new.calls or new.reports):
            return None
        return Delta(index, new.content, sequence.finish_reason, new.calls, new.reports)

    def _close(self, index: int, reason: str) -> None:
        """Notes the end of a sequence; in metrics an answer that calls tools has stopped as others do."""
        self._open.discard(index)
        arrival_time = self._requests[index].arrival_time
        counted = FinishReason.STOP.value if reason == TOOL_CALLS else reason
        self._service.metrics.sequence_finished(counted, time.monotonic() - arrival_time)
        first, last = self._first_token_time[index], self._last_token_time[index]
        if first is not None and last is not None:
            self._service.metrics.decoded(last - first, self._texts[index].num_tokens)

    def _observe_token(self, index: int, event: TokenEvent) -> None:
        now = time.monotonic()
        previous, self._last_token_time[index] = self._last_token_time[index], now
        if previous is None:
            self._first_token_time[index] = now
            if event.start is not None:
                self._num_cached_tokens[index] = event.start.num_cached_tokens
            self._service.metrics.first_token(now - self._requests[index].arrival_time, event.start)
        else:
            self._service.metrics.next_token(now - previous)

    def _refusal(self, error: Exception) -> ApiError:
        """What a failed submit answers."""
        if isinstance(error, InvalidRequestError):
            return self._invalid(error)
        if getattr(error, "slug", None) == "queue_full":
            return too_many_requests(str(error), self._service.config.retry_after_s)
        self._service.require_ready()
        if isinstance(error, (EngineNotReadyError, EngineFailedError)):
            return ApiError(503, error.slug, str(error))
        logger.error("the engine refused a request", exc_info=error)
        return ApiError(500, "internal_error", "the engine refused the request; the server's log has the cause")

    def _failure(self, event: TokenEvent) -> ApiError:
        """What a sequence answers that the engine ended."""
        if event.finish_reason is FinishReason.ABORT:
            return aborted()
        if isinstance(event.error, InvalidRequestError):
            return self._invalid(event.error)
        if isinstance(event.error, EngineFailedError):
            return engine_failed()
        # The message may speak of other requests of the same step, so the log alone has it.
        logger.error("request %s failed", event.request_id, exc_info=event.error)
        slug = getattr(event.error, "slug", "internal_error")
        return ApiError(500, str(slug), "the engine failed while it ran this request; the server's log has the cause")

    def _invalid(self, error: InvalidRequestError) -> ApiError:
        param = self._prompt_param if error.param == "prompt" else error.param
        return ApiError(400, error.slug, str(error), param=param)

"""Prometheus metrics of one server: what it counts itself, and what it asks the engine for when it is scraped.

Names follow vLLM's words with our prefix; docs/server.md says when each moves.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response

from mlxcel_paged.request import RequestStart
from mlxcel_paged.server.engine_api import Engine
from mlxcel_paged.server.engine_metrics import PREFIX, EngineCollector

_FINISH_REASONS = ("stop", "length", "abort", "error")
_ABORT_REASONS = ("client_left", "shutdown")
_FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_NEXT_TOKEN_BUCKETS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_LATENCY_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_REFUSAL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counters of one app in a registry of its own. Written from the event loop alone."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the requests that were accepted")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._finished = self._by_reason(
            "requests_finished", "Sequences that ended, by reason; abort: the client left or the server stopped"
        )
        self._aborted = self._by_reason("requests_aborted", "Sequences that were aborted, by reason")
        self._rejected = self._by_reason("requests_rejected", "Requests answered with an error, by its code")
        self._first_token_s = self._histogram(
            "time_to_first_token_seconds", "From reading a request to its first token", _FIRST_TOKEN_BUCKETS_S
        )
        self._next_token_s = self._histogram(
            "inter_token_latency_seconds", "From one token of a sequence to its next", _NEXT_TOKEN_BUCKETS_S
        )
        self._per_token_s = self._histogram(
            "time_per_output_token_seconds", "Mean time per token after the first, per sequence", _NEXT_TOKEN_BUCKETS_S
        )
        self._latency_s = self._histogram(
            "e2e_request_latency_seconds", "From reading a request to the end of a sequence", _LATENCY_BUCKETS_S
        )
        self._queue_s = self._histogram(
            "request_queue_time_seconds", "From reading a request to its first admission", _FIRST_TOKEN_BUCKETS_S
        )
        self._prefill_s = self._histogram(
            "request_prefill_time_seconds", "From first admission to the first token", _FIRST_TOKEN_BUCKETS_S
        )
        self._decode_s = self._histogram(
            "request_decode_time_seconds", "From the first token to the last", _LATENCY_BUCKETS_S
        )
        self._refusal_s = self._histogram(
            "request_rejection_time_seconds", "From reading a request to refusing it", _REFUSAL_BUCKETS_S
        )
        for reason in _FINISH_REASONS:
            self._finished.labels(reason)
        for reason in _ABORT_REASONS:
            self._aborted.labels(reason)

    def first_token(self, elapsed_s: float, start: RequestStart | None) -> None:
        """A sequence has its first token."""
        self.generation_tokens.inc()
        self._first_token_s.observe(elapsed_s)
        if start is not None:
            self._queue_s.observe(start.queue_s)
            self._prefill_s.observe(start.prefill_s)

    def next_token(self, elapsed_s: float) -> None:
        """A sequence has a further token."""
        self.generation_tokens.inc()
        self._next_token_s.observe(elapsed_s)

    def decoded(self, elapsed_s: float, num_tokens: int) -> None:
        """A sequence that has ended took `elapsed_s` from its first of `num_tokens` tokens to its last."""
        self._decode_s.observe(elapsed_s)
        if num_tokens > 1:
            self._per_token_s.observe(elapsed_s / (num_tokens - 1))

    def sequence_finished(self, reason: str, elapsed_s: float) -> None:
        """A sequence has ended: `stop`, `length`, `abort` or `error`."""
        self._finished.labels(reason).inc()
        self._latency_s.observe(elapsed_s)

    def aborted(self, reason: str) -> None:
        """A sequence was aborted: `client_left`, `shutdown`, or `sibling_failed` (another of its request)."""
        self._aborted.labels(reason).inc()

    def rejected(self, code: str, elapsed_s: float | None = None) -> None:
        """A request was answered with an error, `elapsed_s` after it was read if nothing had been run for it."""
        self._rejected.labels(code).inc()
        if elapsed_s is not None:
            self._refusal_s.observe(elapsed_s)

    def families(self) -> list[Metric]:
        """Everything, as samples."""
        return list(self._registry.collect())

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    async def endpoint(self, _request: Request) -> Response:
        """GET /metrics"""
        return Response(self.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, registry=self._registry)

    def _by_reason(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ["reason"], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)

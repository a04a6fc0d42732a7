"""Prometheus metrics of one server: what it counts itself, and what it asks the engine for when it is scraped.

Names follow vLLM's words with our prefix; docs/server.md says when each moves.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from mlxcel_paged.server.engine_api import Engine

_PREFIX = "mlxcel_paged_"
_FINISH_REASONS = ("stop", "length", "abort", "error")
_FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_NEXT_TOKEN_BUCKETS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_LATENCY_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one app in a registry of its own. Written from the event loop alone."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the requests that were accepted")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._finished = Counter(
            f"{_PREFIX}requests_finished",
            "Sequences that ended, by reason; abort means that the client left or the server stopped",
            ["reason"],
            registry=self._registry,
        )
        self._rejected = Counter(
            f"{_PREFIX}requests_rejected",
            "Requests answered with an error, by its code",
            ["reason"],
            registry=self._registry,
        )
        self._first_token_s = self._histogram(
            "time_to_first_token_seconds", "From reading a request to its first token", _FIRST_TOKEN_BUCKETS_S
        )
        self._next_token_s = self._histogram(
            "inter_token_latency_seconds", "From one token of a sequence to its next", _NEXT_TOKEN_BUCKETS_S
        )
        self._latency_s = self._histogram(
            "e2e_request_latency_seconds", "From reading a request to the end of a sequence", _LATENCY_BUCKETS_S
        )
        for reason in _FINISH_REASONS:
            self._finished.labels(reason)

    def first_token(self, elapsed_s: float) -> None:
        """A sequence has its first token."""
        self.generation_tokens.inc()
        self._first_token_s.observe(elapsed_s)

    def next_token(self, elapsed_s: float) -> None:
        """A sequence has a further token."""
        self.generation_tokens.inc()
        self._next_token_s.observe(elapsed_s)

    def sequence_finished(self, reason: str, elapsed_s: float) -> None:
        """A sequence has ended: `stop`, `length`, `abort` or `error`."""
        self._finished.labels(reason).inc()
        self._latency_s.observe(elapsed_s)

    def rejected(self, code: str) -> None:
        """A request was answered with an error."""
        self._rejected.labels(code).inc()

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    async def endpoint(self, _request: Request) -> Response:
        """GET /metrics"""
        return Response(self.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(_PREFIX + name, text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    """The engine's numbers, all from one snapshot per scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """Keeps the registry from asking an engine that is still loading."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield _gauge("num_requests_running", "Sequences being prefilled or decoded", stats.num_requests_running)
        yield _gauge("num_requests_waiting", "Sequences that wait for a slot or for pages", stats.num_requests_waiting)
        yield _gauge("kv_pages_used", "KV pages held by sequences, over all KV groups", stats.kv_pages_used)
        yield _gauge("kv_pages_total", "KV pages of the pools, over all KV groups", stats.kv_pages_total)
        yield _counter(
            "preemptions", "Sequences put back into the queue because pages ran short", stats.num_preemptions
        )
        yield _counter("prefilled_tokens", "Tokens prefilled, recomputation included", stats.num_prefilled_tokens)
        yield _counter("steps", "Steps of the engine", stats.num_steps)
        yield _counter("failed_steps", "Steps that raised; their requests failed with them", stats.num_failed_steps)
        launches = CounterMetricFamily(
            f"{_PREFIX}decode_launches",
            "Attention launches of decode steps, one per layer and step, by the path that served them",
            labels=["outcome"],
        )
        for outcome, count in sorted({"fused": 0, **stats.decode_launches}.items()):
            launches.add_metric([outcome], count)
        yield launches


def _gauge(name: str, text: str, value: int) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: int) -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + name, text, value=value)

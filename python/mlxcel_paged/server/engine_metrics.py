"""What the server asks the engine for when it is scraped: all numbers of one scrape are from one snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxcel_paged.server.engine_api import Engine, EngineStats

PREFIX = "mlxcel_paged_"


class EngineCollector(Collector):
    """Families made from `Engine.stats`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """Keeps the registry from asking an engine that is still loading."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from _requests(stats)
        yield from _pages(stats)
        yield from _steps(stats)


def _requests(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Sequences being prefilled or decoded", stats.num_requests_running)
    yield _gauge("num_requests_waiting", "Sequences that wait for a slot or for pages", stats.num_requests_waiting)
    yield _gauge("num_queued_tokens", "Tokens of the sequences that wait", stats.num_queued_tokens)
    yield _gauge("oldest_wait_seconds", "How long the head of the queue has waited", stats.oldest_wait_s)
    yield _counter("preemptions", "Sequences put back into the queue because pages ran short", stats.num_preemptions)


def _pages(stats: EngineStats) -> Iterator[Metric]:
    kv = stats.kv
    num_pages = kv.total("num_pages")
    yield _gauge("kv_pages_used", "KV pages held by sequences, over all KV groups", kv.total("num_used"))
    yield _gauge("kv_pages_cached", "KV pages held by the prefix cache alone", kv.total("num_cached"))
    yield _gauge("kv_pages_reserved", "Free KV pages that admitted prompts still need", kv.total("num_reserved"))
    yield _gauge("kv_pages_peak", "Most KV pages held at a time, cached ones included", kv.total("num_peak"))
    yield _gauge("kv_pages_total", "KV pages of the pools, over all KV groups", num_pages)
    usage = kv.total("num_used") / num_pages if num_pages else 0.0
    yield _gauge("kv_cache_usage_perc", "Part of the KV pages that sequences hold, 0 to 1", usage)
    yield _gauge("kv_budget_bytes", "Bytes that pages and workspace were planned within", kv.budget_bytes)
    yield _gauge("kv_workspace_bytes", "Bytes of the budget set aside for the kernels", kv.workspace_bytes)
    yield _gauge("kv_pool_bytes", "Bytes of all KV pages, used or not", kv.pool_bytes)
    yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", kv.num_prefix_queries)
    yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", kv.num_prefix_hits)
    yield _counter("prefix_cache_evicted_pages", "Pages that the prefix cache gave up", kv.num_evicted_pages)
    family = GaugeMetricFamily(PREFIX + "mlx_memory_bytes", "Bytes that MLX holds, by kind", labels=["kind"])
    for kind, count in sorted(stats.memory_bytes.items()):
        family.add_metric([kind], count)
    yield family


def _steps(stats: EngineStats) -> Iterator[Metric]:
    yield _counter("prefilled_tokens", "Tokens prefilled, recomputation included", stats.num_prefilled_tokens)
    yield _counter("steps", "Steps of the engine", stats.num_steps)
    yield _counter("failed_steps", "Steps that raised; their requests failed with them", stats.num_failed_steps)
    yield _counter("stalled_steps", "Steps that ran beyond the step timeout", stats.num_stalled_steps)
    yield _counter("step_seconds", "Time spent on steps, model included", stats.busy_s)
    yield _counter("model_seconds", "Time spent in the model and the sampler", stats.model_s)
    yield _gauge("step_age_seconds", "How long the present step has run", stats.step_age_s)
    yield _labelled(
        "decode_launches",
        "Attention launches of decode steps, one per layer and step, by the path that served them",
        "outcome",
        {"fused": 0, **stats.decode_launches},
    )
    yield _labelled(
        "prefill_launches",
        "Attention launches of prompt chunks, one per layer and chunk, by the path that served them",
        "outcome",
        stats.prefill_launches,
    )
    yield _labelled("plan_changes", "Changes of the decode plans, by cause", "cause", stats.plan_changes)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value, count in sorted(values.items()):
        family.add_metric([value], count)
    return family

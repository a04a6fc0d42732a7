"""Sums up answers under the names of vLLM's `bench serve`, so that results of both can be laid side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlxcel_paged.bench.serve.record import RequestRecord

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def serving_metrics(
    records: Sequence[RequestRecord], *, duration_s: float, goodput_ms: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Computes counts, throughputs and latencies.

    Args:
        records: every request that was sent, failed ones too; latencies and tokens are those of the complete ones.
        duration_s: from the first request to the last answer, summed over the turns that `records` come from.
        goodput_ms: bounds for `ttft`, `tpot` and `e2el`; a request within all of them is good.

    Returns:
        vLLM's keys. `total_input` and `total_output` are also there under the names of vLLM's result files. A
        statistic without samples is None. `request_goodput` is there only with bounds.
    """
    complete = [record for record in records if record.is_complete]
    total_input = sum(record.num_prompt_tokens for record in complete)
    total_output = sum(record.num_output_tokens for record in complete)
    metrics: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(complete),
        "failed": len(records) - len(complete),
        "total_input": total_input,
        "total_output": total_output,
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(complete) / duration_s,
    }
    if goodput_ms:
        num_good = sum(_is_good(record, goodput_ms) for record in complete)
        metrics["request_goodput"] = num_good / duration_s
    metrics["output_throughput"] = total_output / duration_s
    metrics["total_token_throughput"] = (total_input + total_output) / duration_s
    samples = {
        "ttft": [record.ttft_s for record in complete],
        "tpot": [tpot_s for record in complete if (tpot_s := record.tpot_s) is not None],
        "itl": [itl_s for record in complete for itl_s in record.itls_s],
        "e2el": [record.latency_s for record in complete],
    }
    for name, seconds in samples.items():
        metrics |= _statistics(name, seconds)
    return metrics


def _statistics(name: str, seconds: list[float]) -> dict[str, float | None]:
    keys = [f"{statistic}_{name}_ms" for statistic in ("mean", "median", "std", "p99")]
    if not seconds:
        return dict.fromkeys(keys)
    milliseconds = np.asarray(seconds) * 1e3
    values = (milliseconds.mean(), np.median(milliseconds), milliseconds.std(), np.percentile(milliseconds, 99))
    return {key: float(value) for key, value in zip(keys, values, strict=True)}


def _is_good(record: RequestRecord, goodput_ms: Mapping[str, float]) -> bool:
    seconds = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.latency_s}
    return all(seconds[name] * 1e3 <= bound for name, bound in goodput_ms.items())

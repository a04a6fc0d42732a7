"""Times whole decode steps of a model on dense, gathered and fused storage, the arms taking turns step by step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mlxcel_paged.bench.environment import environment
from mlxcel_paged.bench.synthetic import SyntheticKV, dense_arm, paged_arm
from mlxcel_paged.config import EngineConfig

_WARM_UP_STEPS = 2


def bench_decode(
    config: EngineConfig,
    *,
    arms: tuple[str, ...],
    batch: int,
    contexts: Iterable[int],
    num_steps: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures `num_steps` greedy decode steps of every arm at every context, from the same synthetic KV.

    Args:
        config: Model, dtype and page size.
        arms: Out of `dense` (mlx-lm's caches), `gather` and `fused` (pages).
        batch: Sequences that decode together.
        contexts: Tokens of KV that each sequence begins with.
        num_steps: Timed steps, after two untimed ones.

    Returns:
        `{"environment": ..., "model": ..., "arms": [{"arm", "batch", "context", "itl_ms", "tok_per_s", "outcomes",
        "on_own_path", "tokens_equal_first_arm"}]}`. `itl_ms` is the median time of a step, `tok_per_s` the batch's
        tokens over it; `outcomes` counts one launch per layer and step, warm-up included.
    """
    from mlxcel_paged.models.loader import load_model

    progress(f"loading {config.model}")
    loaded = load_model(config.model, device="cpu", dtype=config.dtype, keep_quantized=config.keep_quantized)
    rows: list[dict[str, Any]] = []
    for context in contexts:
        rows += _measure(config, loaded, arms, batch, context, num_steps, progress)
    return {"environment": environment(), "model": loaded.name, "arms": rows}


def _measure(
    config: EngineConfig,
    loaded: Any,
    arms: tuple[str, ...],
    batch: int,
    context: int,
    num_steps: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    kv = SyntheticKV(loaded, batch=batch, context=context)
    max_context = context + _WARM_UP_STEPS + num_steps
    running = {
        arm: dense_arm(loaded, kv)
        if arm == "dense"
        else paged_arm(loaded, kv, arm=arm, page_size=config.page_size, max_context=max_context)
        for arm in arms
    }
    tokens = {arm: [np.arange(batch, dtype=np.int32) + 100] for arm in arms}
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for step in range(_WARM_UP_STEPS + num_steps):
        progress(f"context {context}, step {step + 1} of {_WARM_UP_STEPS + num_steps}")
        for arm in arms:
            start = time.perf_counter()
            logits = running[arm].decode(tokens[arm][-1].tolist())
            tokens[arm].append(np.argmax(np.asarray(logits), axis=-1).astype(np.int32))
            if step >= _WARM_UP_STEPS:
                seconds[arm].append(time.perf_counter() - start)
    rows = []
    for arm in arms:
        step_seconds = statistics.median(seconds[arm])
        outcomes = running[arm].outcomes()
        rows.append(
            {
                "arm": arm,
                "batch": batch,
                "context": context,
                "itl_ms": round(step_seconds * 1e3, 2),
                "tok_per_s": round(batch / step_seconds, 2),
                "outcomes": outcomes,
                "on_own_path": all(outcome.split(":")[0] == arm for outcome in outcomes) and bool(outcomes),
                "tokens_equal_first_arm": bool(np.array_equal(tokens[arm], tokens[arms[0]])),
            }
        )
    return rows

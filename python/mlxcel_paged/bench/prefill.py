"""Times a prompt from its tokens to the first output token: ours, and mlx-lm as installed in a process of its own."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from mlxcel_paged.bench.environment import environment
from mlxcel_paged.bench.prompt import prompt_tokens
from mlxcel_paged.config import EngineConfig
from mlxcel_paged.errors import InvalidFieldError


class StockRunError(RuntimeError):
    """The process that measures mlx-lm failed; carries what it wrote to stderr."""


def bench_prefill(
    config: EngineConfig,
    *,
    arms: tuple[str, ...],
    num_tokens: int,
    num_rounds: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures the prefill of `num_tokens` prompt tokens.

    Returns:
        `{"environment": ..., "cases": [{"arm": "ours"|"stock", "tokens", "seconds", "tok_per_s"}]}`; ours is the median
        of `num_rounds` runs after one untimed run, stock a single run (it takes minutes).
    """
    cases = []
    for arm in arms:
        progress(f"{arm}: {num_tokens} tokens")
        seconds = _ours(config, num_tokens, num_rounds) if arm == "ours" else _stock(config, num_tokens)
        cases.append(
            {
                "arm": arm,
                "tokens": num_tokens,
                "seconds": round(seconds, 3),
                "tok_per_s": round(num_tokens / seconds, 2),
            }
        )
    return {"environment": environment(), "cases": cases}


def _ours(config: EngineConfig, num_tokens: int, num_rounds: int) -> float:
    import mlx.core as mx

    from mlxcel_paged.models.loader import load_model
    from mlxcel_paged.models.paged_model import PagedModel
    from mlxcel_paged.models.paged_rows import PagedRows

    loaded = load_model(config.model, device="cpu", dtype=config.dtype, keep_quantized=config.keep_quantized)
    if num_tokens > loaded.max_context:
        raise InvalidFieldError("num_tokens", num_tokens, f"at most {loaded.max_context}, the context of {loaded.name}")
    tokens = prompt_tokens(loaded.tokenizer, num_tokens)
    model = PagedModel(
        loaded,
        num_pages=-(-num_tokens // config.page_size),
        page_size=config.page_size,
        max_slots=1,
        max_context=num_tokens,
    )
    rows = PagedRows(model)

    def first_token() -> float:
        start = time.perf_counter()
        rows.add(tokens, chunk=config.chunk_tokens(on_cpu=True))
        mx.eval(mx.argmax(rows.decode(tokens[-1:]), axis=-1))
        seconds = time.perf_counter() - start
        rows.close()
        return seconds

    first_token()
    return statistics.median(first_token() for _ in range(num_rounds))


def _stock(config: EngineConfig, num_tokens: int) -> float:
    arguments = {"model": config.model, "dtype": config.dtype, "keep_quantized": config.keep_quantized}
    command = [sys.executable, "-m", "mlxcel_paged.bench.stock_prefill", json.dumps(arguments), str(num_tokens)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise StockRunError(f"{' '.join(command)} exited with {finished.returncode}: {finished.stderr.strip()[-2000:]}")
    return float(json.loads(finished.stdout.splitlines()[-1])["seconds"])

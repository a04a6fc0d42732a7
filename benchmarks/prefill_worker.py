"""One arm of the prefill benchmark in a process of its own: builds the model once, then runs the prompts in turn.

Started by bench_prefill_cuda.py. Writes one JSON object a prompt length to `--out`, each as soon as it is measured, and
the log-probabilities of the first output token beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from step_cells import SHAPES

# Runs a prompt: from its token ids to the first output token, and that token's scores up to a constant.
FirstToken = Callable[[list[int]], tuple[int, Any]]


def ours(options: argparse.Namespace, model: Any, num_tokens: int, dtype: Any) -> tuple[FirstToken, Callable[[], Any]]:
    """Pages, chunks, then the prompt's last token as the first decode row. Also returns what launches did so far."""
    import mlx.core as mx
    from step_arms import scatter_free_pages

    from mlxcel_paged.models.loader import LoadedModel
    from mlxcel_paged.models.paged_model import PagedModel
    from mlxcel_paged.models.paged_rows import PagedRows

    loaded = LoadedModel(model, None, "random", num_tokens, {}, dtype, options.device)  # type: ignore[arg-type]
    paged = PagedModel(
        loaded,
        num_pages=-(-num_tokens // options.page_size),
        page_size=options.page_size,
        max_slots=1,
        max_context=num_tokens,
    )
    scatter_free_pages(paged.page_pools[0])
    rows = PagedRows(paged)

    def first_token(prompt: list[int]) -> tuple[int, mx.array]:
        rows.add(prompt, chunk=options.chunk)
        logits = rows.decode(prompt[-1:])
        token = int(mx.argmax(logits, axis=-1).item())
        rows.close()
        return token, logits[0]

    return first_token, lambda: {"prefill": paged.outcomes.snapshot_prefill(), "decode": paged.outcomes.snapshot()}


def generate_step_arm(model: Any) -> FirstToken:
    """mlx-lm for one sequence, with its defaults (chunks of 2048)."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    def first_token(prompt: list[int]) -> tuple[int, mx.array]:
        token, scores = next(generate_step(mx.array(prompt), model, max_tokens=2))
        return int(token), scores

    return first_token


def batch_generator_arm(model: Any) -> FirstToken:
    """mlx-lm's continuous batching, as its server runs it, with its defaults."""
    from mlx_lm.generate import BatchGenerator

    def first_token(prompt: list[int]) -> tuple[int, Any]:
        generator = BatchGenerator(model, max_tokens=2)
        try:
            generator.insert([prompt])
            responses: list[Any] = []
            while not responses:
                _, responses = generator.next()
            return int(responses[0].token), responses[0].logprobs
        finally:
            generator.close()

    return first_token


def measure(options: argparse.Namespace, model: Any, num_tokens: int, dtype: Any, weights: int) -> dict[str, Any]:
    import mlx.core as mx

    prompt = np.random.default_rng(num_tokens).integers(0, SHAPES[options.shape].vocab_size, num_tokens).tolist()
    outcomes: Callable[[], Any] = dict
    if options.arm == "ours":
        first_token, outcomes = ours(options, model, num_tokens, dtype)
    else:
        first_token = {"generate_step": generate_step_arm, "batch_generator": batch_generator_arm}[options.arm](model)
    seconds, peaks, tokens = [], [], set()
    for _ in range(options.runs + 1):
        mx.synchronize()
        gc.collect()
        mx.reset_peak_memory()
        start = time.perf_counter()
        token, scores = first_token(prompt)
        seconds.append(time.perf_counter() - start)
        tokens.add(token)
        mx.synchronize()
        peaks.append(mx.get_peak_memory())
    found = np.array(scores.astype(mx.float32)).reshape(-1)
    np.save(options.out.with_suffix(f".{num_tokens}.npy"), found)
    problems = [] if np.isfinite(found).all() else ["scores are not finite"]
    if options.arm == "ours" and options.device == "gpu":
        prefill = set(outcomes()["prefill"])
        if not prefill <= {"chunk_sdpa", "write_only"}:
            problems.append(f"prefill took other paths: {outcomes()}")
    return {
        "tokens": num_tokens,
        "arm": options.arm,
        "ttft_ms": round(statistics.median(seconds[1:]) * 1e3, 2),
        "runs_ms": [round(value * 1e3, 2) for value in seconds[1:]],
        "cold_ms": round(seconds[0] * 1e3, 2),
        "weights_gb": round(weights / 1e9, 3),
        "peak_gb": round(max(peaks[1:]) / 1e9, 3),
        "cold_peak_gb": round(peaks[0] / 1e9, 3),
        "cache_gb": round(mx.get_cache_memory() / 1e9, 3),
        "first_token": sorted(tokens),
        "outcomes": outcomes(),
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--page-size", type=int, required=True)
    parser.add_argument("--chunk", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.arm == "ours":
        from mlxcel_paged import blas

        blas.prepare()
    import mlx.core as mx
    import step_arms

    mx.set_default_device(mx.cpu if options.device == "cpu" else mx.gpu)
    dtype = mx.float32 if options.device == "cpu" else mx.float16
    model = step_arms.build_model(SHAPES[options.shape], bits=0, dtype=dtype)
    weights = mx.get_active_memory()
    with options.out.open("w") as out:
        for num_tokens in map(int, options.tokens.split(",")):
            try:
                result = measure(options, model, num_tokens, dtype, weights)
            except Exception as error:  # the other prompts are still worth their time
                print("".join(traceback.format_exception(error)), file=sys.stderr)
                failed = f"{type(error).__name__}: {error}"[:600]
                result = {"tokens": num_tokens, "arm": options.arm, "failed": failed}
            print(json.dumps(result), file=out, flush=True)
            gc.collect()
            mx.clear_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())

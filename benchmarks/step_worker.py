"""One arm of the whole-step benchmark in a process of its own: builds the model once, then runs the cells in turn.

Started by bench_step_mlx.py. Prints one JSON object a cell to the file `--out`, each as soon as it is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from graph_counter import Counters
from step_cells import CELLS, SHAPES, STEP_FUSION, attention_path

# Steps behind the timed ones, with events around each graph launch.
PROFILED_STEPS = 8


def build_arm(options: argparse.Namespace, model: Any, lengths: tuple[int, ...], dtype: Any) -> Any:
    import step_arms

    if options.arm == "mlx-lm":
        return step_arms.BatchGeneratorArm(model, SHAPES[options.shape], lengths, dtype)
    total = options.warm_up + options.steps + 2 * PROFILED_STEPS + 1
    return step_arms.PagedArm(
        model,
        lengths,
        arm=attention_path(options.arm),
        device=options.device,
        page_size=options.page_size,
        max_context=max(lengths) + total,
        dtype=dtype,
        reads_array=options.arm.endswith("-tolist"),
    )


def check(options: argparse.Namespace, arm: Any, lengths: tuple[int, ...], num_steps: int) -> list[str]:
    """What makes the cell's numbers worthless; empty if nothing does."""
    problems = []
    wanted = {"mlx-lm": "BatchKVCache", "fused": "fused", "gather": "gather:forced"}[attention_path(options.arm)]
    launches = num_steps * SHAPES[options.shape].num_hidden_layers
    outcomes = arm.outcomes()
    if outcomes != {wanted: launches}:
        problems.append(f"launches {outcomes}, wanted {launches} of {wanted}")
    held = arm.num_tokens()
    # mlx-lm admits eight sequences at a time and runs one step ahead, so its early rows hold a few tokens more.
    slack = 4 if options.arm == "mlx-lm" else 0
    if any(not 0 <= have - (length + num_steps) <= slack for have, length in zip(held, lengths, strict=True)):
        problems.append(f"sequences hold {held} tokens after {num_steps} steps from {list(lengths)}")
    if not arm.is_finite():
        problems.append("logits are not finite")
    return problems


def traced_kernels(trace: Any, arm: Any) -> dict[str, Any]:
    import mlx.core as mx
    from cupti_trace import KERNEL, kernel_summary

    mx.synchronize()
    trace.enable(KERNEL)
    trace.clear()
    for _ in range(PROFILED_STEPS):
        arm.step()
    mx.synchronize()
    summary = kernel_summary(trace.records(), PROFILED_STEPS)
    trace.enable(KERNEL, False)
    return summary


def measure(
    options: argparse.Namespace, model: Any, name: str, dtype: Any, weights_bytes: int, trace: Any
) -> dict[str, Any]:
    import mlx.core as mx

    lengths = CELLS[name]
    counters = Counters.loaded()
    mx.reset_peak_memory()
    began = time.perf_counter()
    arm = build_arm(options, model, lengths, dtype)
    for _ in range(options.warm_up):
        arm.step()
    setup_seconds = time.perf_counter() - began
    setup_peak = mx.get_peak_memory()
    mx.reset_peak_memory()
    before = counters.snapshot() if counters else {}
    wall, host = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        host.append(arm.step())
        wall.append(time.perf_counter() - start)
    counted = counters.since(before) if counters else None
    active, peak = mx.get_active_memory(), mx.get_peak_memory()
    device_ms = None
    num_steps = options.warm_up + options.steps
    if counters and options.device == "gpu":
        counters.profile(True)
        for _ in range(PROFILED_STEPS):
            arm.step()
        num_steps += PROFILED_STEPS
        total = counters.device_ms()
        counters.profile(False)
        device_ms = None if total is None else round(total / PROFILED_STEPS, 3)
    kernels = None
    if trace:
        kernels = traced_kernels(trace, arm)
        num_steps += PROFILED_STEPS
    problems = check(options, arm, lengths, num_steps)
    arm.close()
    return {
        "cell": name,
        "arm": options.arm,
        "step_fusion": os.environ.get(STEP_FUSION),
        "step_ms": round(statistics.fmean(wall) * 1e3, 3),
        "step_median_ms": round(statistics.median(wall) * 1e3, 3),
        "step_p90_ms": round(statistics.quantiles(wall, n=10)[-1] * 1e3, 3),
        "host_ms": round(statistics.median(host) * 1e3, 3),
        "device_ms": device_ms,
        "kernels": kernels,
        "weights_gb": round(weights_bytes / 1e9, 3),
        "active_gb": round(active / 1e9, 3),
        "peak_gb": round(peak / 1e9, 3),
        "setup_peak_gb": round(setup_peak / 1e9, 3),
        "setup_s": round(setup_seconds, 2),
        "counted": counted,
        "counter_sees_launches": bool(counted and counted.get("graph_launches")),
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", required=True)
    parser.add_argument("--cells", required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--page-size", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--trace", choices=("on", "off"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    trace = None
    if options.trace == "on":
        from cupti_trace import CuptiTrace

        trace = CuptiTrace(options.out.parent)
    if options.arm != "mlx-lm":
        from mlxcel_paged import blas

        blas.prepare()
    import mlx.core as mx
    import step_arms

    mx.set_default_device(mx.cpu if options.device == "cpu" else mx.gpu)
    dtype = mx.float32 if options.device == "cpu" else mx.float16
    model = step_arms.build_model(SHAPES[options.shape], bits=options.bits, dtype=dtype)
    if options.arm != "mlx-lm" and options.bits:
        from mlxcel_paged.models.flat_quantized import flatten_quantized

        flatten_quantized(model)
    weights = mx.get_active_memory()
    with options.out.open("w") as out:
        for name in options.cells.split(","):
            try:
                result = measure(options, model, name, dtype, weights, trace)
            except Exception as error:  # the other cells are still worth their time
                text = "".join(traceback.format_exception(error))
                print(text, file=sys.stderr)
                result = {"cell": name, "arm": options.arm, "failed": f"{type(error).__name__}: {error}"[:600]}
            print(json.dumps(result), file=out, flush=True)
            gc.collect()
            mx.clear_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())

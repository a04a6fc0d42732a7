"""Products of a few rows with the weights of Llama-3.1-8B under MLX on a GPU: MLX's own beside our kernels.

    python benchmarks/bench_products_cuda.py --out products.json              # every cell, rows 1 to 16, f16 and 4 bits
    python benchmarks/bench_products_cuda.py --out products.json --quick      # rows 4 and 16 of q/k/v, o and gate/up

With --quick MLX's own 4-bit products are left out: it compiles them for half a minute.

Arms: `mlx` is MLX's product, quantized weights with the rows as one matrix; `single` our kernel, one launch a matrix;
`siblings` one launch for all matrices of the cell. Random weights; group size 64 where they are quantized.

- device: a chain of products, each with the output of the one before, evaluated at once; events around every graph
  launch, over the length. Weights take turns through more memory than L2 holds. A cell whose output is shorter than its
  input goes through another product in between, whose own time is taken off. A cell of several matrices counts as one.
- host: the time to build such a chain in Python, and from `async_eval` until it returns, over its length. The host's
  clock says little where a device is much slower, so it is taken for the small cells.

Medians over repeats. An arm is rejected if it differs from a product in float32 by more than rounding.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import graph_counter
from gpu_needs import require_mlx_gpu
from products_arms import CELLS, HOST_CELLS, Case, arms_of
from run_record import write_run

QUICK_CELLS = ("qkv", "o", "gate_up")
QUICK_ROWS = (4, 16)
ROWS = (1, 2, 4, 8, 16)
MIN_ROTATED_BYTES = 200 << 20
REPEATS = 5
HOST_REPEATS = 15
HOST_ROWS = 4


def device_us(counters: graph_counter.Counters, case: Case, arm: str, num_rows: int) -> float | None:
    """Microseconds of one product of the cell, or None if the driver gives no times."""
    import mlx.core as mx

    times = []
    build_chain = case.prepared(arm, num_rows)
    for repeat in range(REPEATS + 2):
        outputs = build_chain()
        counters.profile(True)
        mx.eval(outputs)
        total_ms = counters.device_ms()
        counters.profile(False)
        if total_ms is None:
            return None
        if repeat >= 2:
            times.append(total_ms * 1e3 / case.length)
    return statistics.median(times)


def host_us(case: Case, arm: str) -> dict[str, float]:
    """Microseconds of the host for one product of the cell: to build it, and to launch it."""
    import mlx.core as mx

    build, launch = [], []
    build_chain = case.prepared(arm, HOST_ROWS)
    for _ in range(HOST_REPEATS):
        started_at = time.perf_counter()
        outputs = build_chain()
        built_at = time.perf_counter()
        mx.async_eval(outputs)
        launched_at = time.perf_counter()
        mx.synchronize()
        build.append((built_at - started_at) * 1e6 / case.length)
        launch.append((launched_at - built_at) * 1e6 / case.length)
    return {"build_us": round(statistics.median(build[2:]), 2), "launch_us": round(statistics.median(launch[2:]), 2)}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    import mlx.core as mx

    counters = graph_counter.Counters.loaded()
    results: list[dict[str, Any]] = []
    cells = QUICK_CELLS if options.quick else tuple(CELLS)
    for storage in options.storages.split(","):
        for name in cells:
            cell = CELLS[name]
            copies = max(1, math.ceil(MIN_ROTATED_BYTES / cell.num_bytes(storage)))
            case = Case(cell, storage, copies)
            bridge = Case(CELLS[cell.bridge], storage, copies) if cell.bridge else None
            arms = [arm for arm in arms_of(cell) if not (options.quick and storage != "f16" and arm == "mlx")]
            for num_rows in QUICK_ROWS if options.quick else ROWS:
                for arm in arms:
                    error = case.error(arm, num_rows)
                    result: dict[str, Any] = {"cell": name, "storage": storage, "rows": num_rows, "arm": arm}
                    result["error"] = error
                    if not error <= case.tolerance:
                        result["failed"] = f"differs from a product in float32 by {error:.2g} of the largest value"
                    elif counters is not None:
                        us = device_us(counters, case, arm, num_rows)
                        if us is not None and bridge is not None:
                            us -= device_us(counters, bridge, arm, num_rows) or 0.0
                        if us is not None and us > 0:
                            result["device_us"] = round(us, 2)
                            result["gb_per_s"] = round(cell.num_bytes(storage) / us / 1e3)
                    results.append(result)
            if name in HOST_CELLS:
                for arm in arms:
                    host = {"cell": name, "storage": storage, "rows": HOST_ROWS, "arm": arm, "host": host_us(case, arm)}
                    results.append(host)
            del case, bridge
            mx.clear_cache()
    return results


def table(results: list[dict[str, Any]]) -> str:
    """Microseconds of every cell, `mlx / single / siblings`."""
    by_place = {(r["storage"], r["cell"], r["rows"], r["arm"]): r for r in results if "host" not in r}
    rows = sorted({place[2] for place in by_place})
    lines = ["device us, mlx / single / siblings", "", "| weights | " + " | ".join(f"{n} rows" for n in rows) + " |"]
    lines.append("|---" * (len(rows) + 1) + "|")
    for storage, name in dict.fromkeys(place[:2] for place in by_place):
        cell = CELLS[name]
        texts = []
        for num_rows in rows:
            found = (by_place.get((storage, name, num_rows, arm)) for arm in arms_of(cell))
            texts.append(" / ".join("failed" if r and "failed" in r else _number(r, "device_us") for r in found))
        lines.append(f"| {storage} {name}: {cell.text} | " + " | ".join(texts) + " |")
    lines += [
        "",
        f"host us at {HOST_ROWS} rows, build + launch",
        "",
        "| weights | mlx | single | siblings |",
        "|---|---|---|---|",
    ]
    hosts = {(r["storage"], r["cell"], r["arm"]): r["host"] for r in results if "host" in r}
    for storage, name in dict.fromkeys(place[:2] for place in hosts):
        texts = []
        for arm in ("mlx", "single", "siblings"):
            host = hosts.get((storage, name, arm))
            texts.append(f"{host['build_us']:.1f} + {host['launch_us']:.1f}" if host else "")
        lines.append(f"| {storage} {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _number(result: dict[str, Any] | None, key: str) -> str:
    return f"{result[key]:.1f}" if result and key in result else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="rows 4 and 16 of the cells q/k/v, o and gate/up")
    parser.add_argument("--storages", default="f16,4-bit")
    options = parser.parse_args()
    if graph_counter.Counters.loaded() is None:
        require_mlx_gpu(without="")
        with tempfile.TemporaryDirectory() as folder:
            try:
                environment = graph_counter.preload(graph_counter.build(Path(folder)))
            except (OSError, subprocess.SubprocessError) as error:
                print(f"no times of the device, the graph counter cannot be built: {error}", file=sys.stderr)
            else:
                return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
    import mlx.core as mx

    mx.set_default_device(mx.gpu)
    started_at = time.perf_counter()
    results = measure(options)
    text = table(results)
    document = {"results": results, "seconds": round(time.perf_counter() - started_at, 1)}
    write_run(options.out, document, complete=True)
    print(text)
    failed = [result for result in results if "failed" in result]
    for result in failed:
        print(f"failed: {result}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

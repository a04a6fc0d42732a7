"""Decode attention on one NVIDIA GPU: our kernel beside FlashInfer, XQA, cuDNN and a plain reader, in one process.

Every arm runs over the same rotated pools (more than 400 MB), as CUDA-graph replays, and is checked against an f64
reference first. Times are medians. Useful bytes are K and V of the visible tokens.

    python benchmarks/bench_decode_cuda.py --out result.json [--cells 32/8] [--arms ours,roof]

Needs torch; the peers need flashinfer-python 0.6.1 and nvcc. The JSON is written after every cell.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from decode_cuda_cells import CELLS, Cell
from gpu_needs import require_torch_gpu
from run_record import write_run

if TYPE_CHECKING:
    import decode_cuda_arms as arms

ARMS = ("ours", "roof", "flashinfer", "xqa", "cudnn")
TOLERANCE = 1.5e-3
READER_BLOCKS = (1, 2, 4, 8)


def measure(make: Callable[[], arms.Arm], pools: arms.Pools, samples: int) -> dict[str, object]:
    """One arm of one cell: its time, or why there is none."""
    import decode_cuda_arms as arms

    try:
        arm = make()
        error = None
        if arm.output is not None:
            arm.launch(0)
            wanted = arms.reference(pools, arm.page_size, arm.layout)
            difference = (arm.output().double() - wanted).abs().amax(-1) / wanted.abs().amax(-1)
            error = float(difference.max())
            if not error <= TOLERANCE:
                return {"arm": arm.name, "failed": f"error {error} exceeds {TOLERANCE}"}
        us = arms.median_us(arm, pools.num_pools, samples)
    except Exception as problem:  # a peer that cannot serve a shape is a result, not the end of the run
        return {"failed": "".join(traceback.format_exception_only(problem)).strip()[:500]}
    gb_per_s = pools.cell.useful_bytes / us / 1e3
    return {"arm": arm.name, "us": round(us, 3), "gb_per_s": round(gb_per_s), "error": error}


def run_cell(cell: Cell, wanted: set[str], reader: arms.Reader, samples: int) -> dict[str, object]:
    import decode_cuda_arms as arms

    pools = arms.Pools(cell)
    plain = cell.context is None
    uniform = plain and len(set(cell.lengths)) == 1
    makers: dict[str, Callable[[], arms.Arm]] = {}
    if "ours" in wanted:
        makers["ours p16"] = lambda: arms.ours(pools, 16, "HND")
        makers["ours p64"] = lambda: arms.ours(pools, 64, "HND")
        makers["ours p16 NHD"] = lambda: arms.ours(pools, 16, "NHD")
        makers["ours p16 overlapped"] = lambda: arms.ours(pools, 16, "HND", overlaps=True)
        makers["ours p64 overlapped"] = lambda: arms.ours(pools, 64, "HND", overlaps=True)
    if "flashinfer" in wanted and plain:
        makers["flashinfer p16"] = lambda: arms.flashinfer(pools)
    if "xqa" in wanted and plain:
        makers["xqa p16"] = lambda: arms.xqa(pools, 16)
        makers["xqa p64"] = lambda: arms.xqa(pools, 64)
    if "cudnn" in wanted and uniform:
        makers["cudnn dense"] = lambda: arms.cudnn(pools)
    results = {name: measure(make, pools, samples) for name, make in makers.items()}
    if "roof" in wanted:
        # As with the others, a launch reads one pool; the reader gets the best of several grids.
        tried = [measure(lambda n=n: reader.arm(pools, n), pools, samples) for n in READER_BLOCKS]
        results["roof"] = min(tried, key=lambda result: result.get("us", float("inf")))
    return {"cell": cell.name, "useful_bytes": cell.useful_bytes, "num_pools": pools.num_pools, "arms": results}


def row_text(row: dict) -> str:
    times = {name: result.get("us") for name, result in row["arms"].items()}
    best = min((us for name, us in times.items() if us and name.startswith("ours")), default=None)
    parts = [f"{row['cell']:26}"]
    for name, us in times.items():
        parts.append(f"{name} {us:.2f}" if us else f"{name} failed")
        if us and best and not name.startswith("ours"):
            parts[-1] += f" ({us / best:.3f}x)"
    return " | ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", default="", help="comma-separated starts of cell names; all when empty")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--samples", type=int, default=21)
    options = parser.parse_args()
    starts = tuple(options.cells.split(","))
    cells = [cell for cell in CELLS if cell.name.startswith(starts)]
    if not cells:
        parser.error(f"--cells: none begins so; known: {', '.join(cell.name for cell in CELLS)}")
    wanted = set(options.arms.split(","))
    if unknown := wanted - set(ARMS):
        parser.error(f"--arms: unknown {', '.join(sorted(unknown))}; known: {', '.join(ARMS)}")
    require_torch_gpu(("flashinfer",) if wanted & {"flashinfer", "xqa"} else ())
    import decode_cuda_arms as arms
    import torch

    reader = arms.Reader()
    rows: list[dict] = []
    device = torch.cuda.get_device_properties(0)
    for cell in cells:
        rows.append(run_cell(cell, wanted, reader, options.samples))
        torch.cuda.empty_cache()
        print(row_text(rows[-1]), flush=True)
        document = {
            "multiprocessors": device.multi_processor_count,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "samples": options.samples,
            "cells_complete": len(rows),
            "cells_wanted": len(cells),
            "rows": rows,
        }
        write_run(options.out, document, complete=len(rows) == len(cells))
    failed = [row["cell"] for row in rows if any("failed" in result for result in row["arms"].values())]
    if failed:
        print("arms failed in:", ", ".join(failed))
    return 0


if __name__ == "__main__":
    sys.exit(main())

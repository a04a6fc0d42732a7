"""Counts CUDA graph re-instantiations and uploads while a batch changes inside one bucket.

    python benchmarks/count_graphs.py --out graphs.json

2,000 steps of the engine's own scheduler, runner and step loop over Llama-3.1-8B shapes with random weights: requests
come, cross pages and end; the batch wanders between half of its places and all of them, after a warm-up that visits
every batch size. Two processes run the same steps:

- `driver`: with the graph counter preloaded, which counts cuGraphInstantiate*, cuGraphExecUpdate and its failures,
  cuGraphLaunch, managed allocations, prefetches, and the bytes of copies (benchmarks/graph_counter).
- `cupti`: with CUPTI's records of managed-memory migrations, page faults and copies, which is where an upload shows
  under MLX; then a few steady steps with a record a kernel: kernels and kernel time of a step (benchmarks/cupti_trace).

Counts are kept apart for steady turns (the rows of the turn before, nothing prefilled) and for turns in which requests
came or went. Wanted: no instantiation in any turn, no byte from host to device in steady ones.
"""

from __future__ import annotations

import argparse
import bisect
import ctypes
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import graph_counter
from step_cells import SHAPES, TARGET_SHAPE

MODES = ("driver", "cupti")
# A turn's kernels run while the next turns are prepared, so what CUPTI sees after a change is counted with the change.
SETTLING_TURNS = 2


def count(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One process: builds the core, warms up, counts."""
    counters = graph_counter.Counters.loaded() if options.mode == "driver" else None
    trace = None
    migrations = "not asked for"
    if options.mode == "cupti":
        from cupti_trace import MEMCPY, CuptiTrace, CuptiUnavailableError

        ctypes.CDLL("libcuda.so.1").cuInit(0)
        trace = CuptiTrace(folder)
        trace.enable(MEMCPY)
        try:
            trace.count_migrations()
            migrations = "counted"
        except CuptiUnavailableError as error:  # copies and kernels are still worth having
            migrations = str(error)
    from mlxcel_paged import blas

    blas.prepare()
    import mlx.core as mx
    from traffic import Traffic, build_core

    core = build_core(
        SHAPES[options.shape],
        device=options.device,
        bits=options.bits,
        batch=options.batch,
        page_size=options.page_size,
        max_context=2048,
        budget_bytes=options.budget_mb << 20,
    )
    traffic = Traffic(core, batch=options.batch, prompt_tokens=options.prompt_tokens, page_size=options.page_size)
    warm_turns = traffic.warm_up()
    mx.synchronize()
    if trace:
        trace.clear()
    finished_before = traffic.num_finished
    sums: dict[str, Counter[str]] = {"steady": Counter(), "changed": Counter()}
    turns: dict[str, int] = {"steady": 0, "changed": 0}
    sizes: Counter[int] = Counter()
    crossings = prefills = 0
    instantiated_at: list[int] = []
    starts: list[int] = []
    kinds: list[str] = []
    began = time.perf_counter()
    before = counters.snapshot() if counters else {}
    for index in range(options.steps):
        if trace:
            starts.append(trace.now_ns())
        turn = traffic.turn()
        kind = "steady" if turn.is_steady else "changed"
        kinds.append(kind)
        turns[kind] += 1
        sizes[turn.num_rows] += 1
        crossings += turn.num_crossings
        prefills += turn.has_prefill
        if counters:
            counted = counters.since(before)
            before = counters.snapshot()
            sums[kind].update(counted)
            if counted.get("graph_instantiations"):
                instantiated_at.append(index)
    mx.synchronize()
    seconds = time.perf_counter() - began
    result: dict[str, Any] = {
        "mode": options.mode,
        "migrations": migrations,
        "turns": turns,
        "batch_sizes": dict(sorted(sizes.items())),
        "warm_up_turns": warm_turns,
        "page_crossings": crossings,
        "turns_with_prefill": prefills,
        "requests_finished": traffic.num_finished - finished_before,
        "launches": core.runner.outcomes(),
        "ms_per_turn": round(seconds / options.steps * 1e3, 3),
    }
    if trace:
        sums = attribute(trace, starts, kinds)
        result["kernels"] = kernels_of(trace, traffic, options.traced_steps)
    else:
        result["instantiated_at"] = instantiated_at[:50]
    result["counted"] = {kind: dict(total) for kind, total in sums.items()}
    return result


def attribute(trace: Any, starts: list[int], kinds: list[str]) -> dict[str, Counter[str]]:
    """CUPTI's migrations and copies, summed by the kind of the turn in which they happened."""
    from cupti_trace import COPY_DETAILS, MEMCPY, MIGRATION, MIGRATION_DETAILS

    settled = [
        "steady" if all(kind == "steady" for kind in kinds[max(0, index - SETTLING_TURNS) : index + 1]) else "changed"
        for index in range(len(kinds))
    ]
    sums: dict[str, Counter[str]] = {"steady": Counter(), "changed": Counter()}
    sums["steady"]["turns"] = settled.count("steady")
    sums["changed"]["turns"] = settled.count("changed")
    for record in trace.records():
        turn = settled[max(0, bisect.bisect_right(starts, record.start_ns) - 1)]
        if record.kind == MIGRATION:
            # A CPU page fault's value is a program counter.
            name = MIGRATION_DETAILS[record.detail]
            sums[turn][f"migrated_{name}" if name.endswith("bytes") else name] += (
                1 if name == "cpu_page_faults" else record.value
            )
        elif record.kind == MEMCPY:
            direction = COPY_DETAILS.get(record.detail, f"kind_{record.detail}")
            sums[turn][f"copied_{direction}_bytes"] += record.value
            sums[turn][f"copies_{direction}"] += 1
    return sums


def kernels_of(trace: Any, traffic: Any, num_turns: int) -> dict[str, Any]:
    """Kernels of some further turns."""
    import mlx.core as mx
    from cupti_trace import KERNEL, kernel_summary

    mx.synchronize()
    trace.enable(KERNEL)
    trace.clear()
    turns = [traffic.turn() for _ in range(num_turns)]
    mx.synchronize()
    steady = sum(turn.is_steady for turn in turns)
    return {"turns": num_turns, "of_them_steady": steady, **kernel_summary(trace.records(), num_turns)}


def verdicts(results: list[dict[str, Any]]) -> dict[str, bool | None]:
    """Whether each target holds; None where nothing was measured."""
    found: dict[str, bool | None] = {"no_instantiation": None, "nothing_copied_up": None, "nothing_migrated_up": None}
    for result in results:
        if "failed" in result:
            continue
        counted = result["counted"]
        if result["mode"] == "driver" and (counted["steady"].get("graph_launches") or 0) > 0:
            found["no_instantiation"] = not any(part.get("graph_instantiations") for part in counted.values())
            found["nothing_copied_up"] = not counted["steady"].get("htod_bytes")
        if result["mode"] == "cupti" and result["migrations"] == "counted":
            steady = counted["steady"]
            found["nothing_migrated_up"] = not (steady.get("migrated_htod_bytes") or steady.get("copied_htod_bytes"))
    return found


def run_mode(options: argparse.Namespace, mode: str, folder: Path) -> dict[str, Any]:
    environment = dict(os.environ)
    if mode == "driver":
        environment = graph_counter.preload(graph_counter.build(folder))
    command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode]
    try:
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=280)
    except subprocess.TimeoutExpired:
        return {"mode": mode, "failed": "no end within 280 s"}
    if done.returncode:
        return {"mode": mode, "failed": done.stderr[-1500:]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("graphs.json"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--traced-steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8, help="places of the bucket")
    parser.add_argument("--prompt-tokens", type=int, default=33)
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--bits", type=int, default=0, choices=(0, 4, 8))
    parser.add_argument("--budget-mb", type=int, default=4096)
    parser.add_argument("--shape", default=TARGET_SHAPE, choices=SHAPES)
    parser.add_argument("--device", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.mode:
            print(json.dumps(count(options, Path(name))))
            return 0
        results = [run_mode(options, mode, Path(name)) for mode in options.modes.split(",")]
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "batch": options.batch,
        "steps": options.steps,
        "targets": verdicts(results),
        "results": results,
    }
    options.out.write_text(json.dumps(document, indent=1))
    print(json.dumps({"targets": document["targets"], "results": results}, indent=1))
    return 1 if any("failed" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())

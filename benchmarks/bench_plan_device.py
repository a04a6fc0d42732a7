"""Host time that paging costs in a steady decode step: calls into the Rust core, and the scheduler around them.

    python benchmarks/bench_plan_device.py --out plan.json --device gpu
    python benchmarks/bench_plan_device.py --out plan.json --evict-mb 64

The engine's own scheduler, runner and step loop run a batch whose rows stay. Per step, medians over the steps in which
no row crosses into a page:

- rust: time in methods and attributes of the core's classes (page tables, pools, plans, rows, device mirrors), from
  the caller's side. Two clock reads stand around each call (`core_calls.py`). What they cost is measured at the start
  of each step, on an empty function, and taken off each call; `clock_ns` is its median, `raw_us` the sum with it. One
  step runs under the interpreter's profiling hook first: a method of the core that is called and not timed ends the
  script. Functions of the module, which are the CPU's kernels, are named in `left_out` and not counted.
- crossing: the same for steps in which every row takes a page.
- schedule: the scheduler's `schedule()` with the interpreter's part, without timing functions inside.
- advance: `DecodePlan.advance` alone, timed inside the core, in warm caches.

Between two steps an engine does milliseconds of other work, so the core's code and data are cold. On a GPU the step
itself is that work. `--evict-mb` stands for it on a CPU: that much memory is written between the steps; it should
exceed the last cache, which is harsher than an engine is. On a CPU nothing asks for the device's copy of the plan, so
the script syncs a mirror of each plan itself, when the engine on a GPU would. `DecodePlan.num_rows` is the CPU's alone.

What a step uploads is counted by count_graphs.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from gpu_needs import require_mlx_gpu
from run_record import write_run
from step_cells import SHAPES

TARGET_RUST_US = 5.0
_NUM_WORKERS = 132  # blocks of an H200, for the mirrors of the CPU
_LINE_BYTES = 64


class SteadyBatch:
    """A batch of equal prompts in the engine's own loop.

    Attributes:
        num_crossing: rows of the last turn whose token begins a page.
        is_whole: whether every row took part in it.
        schedule_ns: what its `schedule()` took.
    """

    def __init__(self, options: argparse.Namespace, batch: int) -> None:
        from traffic import core_over, load_random

        from mlxcel_paged import _core
        from mlxcel_paged.engine.step_loop import StepLoop
        from mlxcel_paged.engine.step_times import StepTimes
        from mlxcel_paged.request import Request, SamplingParams

        total = options.warm_up + 2 * options.steps + 1
        max_context = options.prompt_tokens + total + 8
        loaded = load_random(SHAPES[options.shape], device=options.device, bits=0, max_context=max_context)
        # All prompts fit one step, so that all rows begin and cross pages together.
        num_prompt_tokens = batch * options.prompt_tokens
        core = core_over(
            loaded,
            batch=batch,
            page_size=options.page_size,
            budget_bytes=options.budget_mb << 20,
            prefill_chunk=num_prompt_tokens,
            max_num_batched_tokens=num_prompt_tokens + batch,
        )
        sampling = SamplingParams(max_tokens=total + 4, temperature=0.0, ignore_eos=True)
        for index in range(batch):
            core.scheduler.add(Request(f"r{index}", [index % 1000] * options.prompt_tokens, sampling))
        self.num_crossing, self.is_whole, self.schedule_ns = 0, False, 0
        self._batch, self._page_size = batch, options.page_size
        self._mirrors = []
        if options.device == "cpu":
            plans = [group.plan for group in core.scheduler.groups.groups]
            self._mirrors = [_core.DeviceMirror(plan, _NUM_WORKERS) for plan in plans]
        scheduler: Any = core.scheduler
        self._schedule = scheduler.schedule
        scheduler.schedule = self._timed_schedule
        self._loop = StepLoop(core, lambda events: None, StepTimes())
        self._lines = np.zeros((options.evict_mb << 20) // _LINE_BYTES * (_LINE_BYTES // 8), np.int64)

    def evict(self) -> None:
        """Writes one word of each cache line of the spare memory."""
        self._lines[:: _LINE_BYTES // 8] += 1

    def turn(self) -> None:
        """One step."""
        self._loop.turn()

    def _timed_schedule(self) -> Any:
        started = time.perf_counter_ns()
        step = self._schedule()
        self.schedule_ns = time.perf_counter_ns() - started
        rows = step.decode if step else []
        self.is_whole = len(rows) == self._batch
        self.num_crossing = sum(row.position % self._page_size == 0 for row in rows)
        if rows:
            for mirror in self._mirrors:
                if not self.is_whole or not mirror.try_sync():
                    mirror.sync(len(rows))
        return step


def measure(options: argparse.Namespace, batch: int) -> dict[str, Any]:
    from core_calls import CoreCalls

    from mlxcel_paged import _core

    steady = SteadyBatch(options, batch)
    for _ in range(options.warm_up):
        steady.turn()
    plain = []
    for _ in range(options.steps):
        steady.evict()
        steady.turn()
        if steady.is_whole and not steady.num_crossing:
            plain.append(steady.schedule_ns)

    timer = CoreCalls()
    timer.install()
    try:
        with timer.profiled() as left_out:
            steady.turn()
        untimed = [name for name in left_out if "." in name]
        if untimed:
            raise SystemExit(f"the step calls methods of the core that are not timed: {untimed}")
        costs: list[int] = []
        net: dict[bool, list[int]] = {False: [], True: []}
        raw: list[int] = []
        by_name: dict[str, list[int]] = {}
        counts = Counter[str]()
        for _ in range(options.steps):
            steady.evict()
            cost = timer.calibrate()
            steady.turn()
            calls = timer.take()
            if not steady.is_whole or steady.num_crossing not in (0, batch):
                continue
            net[steady.num_crossing > 0].append(sum(max(0, ns - cost) for _, ns in calls))
            if steady.num_crossing:
                continue
            costs.append(cost)
            raw.append(sum(ns for _, ns in calls))
            for name, ns in calls:
                by_name.setdefault(name, []).append(max(0, ns - cost))
                counts[name] += 1
    finally:
        timer.remove()
    if not raw:
        raise SystemExit(f"no steady step among {options.steps}: raise --steps or --page-size")
    advance_ns = _core.bench_plan(batch, options.prompt_tokens, options.page_size)["advance_ns"]
    rust_us = statistics.median(net[False]) / 1e3
    crossing = net[True]
    return {
        "batch": batch,
        "steady_steps": len(raw),
        "rust_us": round(rust_us, 2),
        "raw_us": round(statistics.median(raw) / 1e3, 2),
        "clock_ns": round(statistics.median(costs)),
        "crossing_us": round(statistics.median(crossing) / 1e3, 2) if crossing else None,
        "schedule_us": round(statistics.median(plain) / 1e3, 2) if plain else None,
        "advance_us": round(advance_ns / 1e3, 3),
        "calls_per_step": {name: round(count / len(raw), 2) for name, count in counts.most_common()},
        "call_ns": {name: round(statistics.median(found)) for name, found in by_name.items()},
        "left_out": dict(left_out),
        "met": rust_us <= TARGET_RUST_US,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("plan.json"))
    parser.add_argument("--batches", default="4,16,64")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=65)
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--budget-mb", type=int, default=256)
    parser.add_argument("--evict-mb", type=int, default=0, help="memory to write between steps (default: none)")
    parser.add_argument("--shape", default="tiny", choices=SHAPES, help="the host's part does not depend on it")
    parser.add_argument("--device", default="cpu", choices=("gpu", "cpu"))
    options = parser.parse_args()
    if options.device == "gpu":
        require_mlx_gpu("--device cpu")
    from mlxcel_paged import blas

    blas.prepare()
    batches = [int(batch) for batch in options.batches.split(",")]
    rows: list[dict[str, Any]] = []
    for batch in batches:
        rows.append(measure(options, batch))
        document = {"target_rust_us": TARGET_RUST_US, "batches_complete": len(rows), "rows": rows}
        write_run(options.out, document, complete=len(rows) == len(batches))
    for row in rows:
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())

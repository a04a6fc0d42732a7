"""Host time that paging costs in a steady decode step: calls into the Rust core, and the scheduler around them.

    python benchmarks/bench_plan_device.py --out plan.json --device gpu

The engine's own scheduler, runner and step loop run a batch whose rows stay; steps in which a row crosses into a page
are left out. Per step, medians:

- rust: time inside the core's methods (page tables, pools, plans), seen by the interpreter's profiling hook, whose own
  cost is measured on an empty call and taken off. Attribute reads are not seen; kernels that run on the CPU are not
  counted.
- schedule: the scheduler's `schedule()` with the interpreter's part, without the hook.
- advance: `DecodePlan.advance` alone, timed inside the core.

What a step uploads is counted by count_graphs.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from step_cells import SHAPES

TARGET_RUST_US = 5.0
_CORE = "mlxcel_paged._core"
_COUNTED = ("PageTable.", "PagePool.", "DecodePlan.", "DeviceMirror.", "BlockBudget.")


class CallTimer:
    """Nanoseconds inside the core's methods between `begin` and `end`."""

    def __init__(self) -> None:
        self._started = 0
        self._overhead_ns = 0
        self.calls: list[tuple[str, int]] = []
        self._overhead_ns = self._empty_call_ns()

    def begin(self) -> None:
        self.calls = []
        sys.setprofile(self._hook)

    def end(self) -> None:
        sys.setprofile(None)

    def _hook(self, _frame: Any, event: str, callee: Any) -> None:
        now = time.perf_counter_ns()
        if event == "c_return" and _is_counted(callee):
            self.calls.append((callee.__qualname__, max(0, now - self._started - self._overhead_ns)))
        # Last of all, so that the hook's own work lies outside.
        self._started = time.perf_counter_ns()

    def _empty_call_ns(self) -> int:
        from mlxcel_paged import _core

        pool = _core.PagePool(1)
        samples = []
        for _ in range(200):
            self.begin()
            pool.release([])
            self.end()
            samples += [ns for _, ns in self.calls]
        return round(statistics.median(samples))


def _is_counted(callee: Any) -> bool:
    bound_to = getattr(callee, "__self__", None)  # None for a static method
    is_of_core = bound_to is None or type(bound_to).__module__ == _CORE
    return is_of_core and getattr(callee, "__qualname__", "").startswith(_COUNTED)


def measure(options: argparse.Namespace, batch: int) -> dict[str, Any]:
    from traffic import core_over, load_random

    from mlxcel_paged import _core
    from mlxcel_paged.engine.step_loop import StepLoop
    from mlxcel_paged.engine.step_times import StepTimes
    from mlxcel_paged.request import Request, SamplingParams

    total = options.warm_up + 2 * options.steps
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
    crossed = False
    schedule_ns = 0
    original_schedule = core.scheduler.schedule
    timer = CallTimer()

    def schedule() -> Any:
        nonlocal crossed, schedule_ns
        started = time.perf_counter_ns()
        step = original_schedule()
        schedule_ns = time.perf_counter_ns() - started
        rows = step.decode if step else []
        crossed = len(rows) != batch or any(row.position % options.page_size == 0 for row in rows)
        return step

    scheduler: Any = core.scheduler
    scheduler.schedule = schedule
    loop = StepLoop(core, lambda events: None, StepTimes())
    for _ in range(options.warm_up):
        loop.turn()
    plain = []
    for _ in range(options.steps):
        loop.turn()
        if not crossed:
            plain.append(schedule_ns)
    rust, by_name = [], Counter[str]()
    for _ in range(options.steps):
        timer.begin()
        loop.turn()
        timer.end()
        if not crossed:
            rust.append(sum(ns for _, ns in timer.calls))
            by_name.update(name for name, _ in timer.calls)
    advance_ns = _core.bench_plan(batch, options.prompt_tokens, options.page_size)["advance_ns"]
    return {
        "batch": batch,
        "steady_steps": len(rust),
        "rust_us": round(statistics.median(rust) / 1e3, 2),
        "schedule_us": round(statistics.median(plain) / 1e3, 2),
        "advance_us": round(advance_ns / 1e3, 3),
        "calls_per_step": {name: round(count / len(rust), 1) for name, count in by_name.most_common()},
        "met": statistics.median(rust) / 1e3 <= TARGET_RUST_US,
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
    parser.add_argument("--shape", default="tiny", choices=SHAPES, help="the host's part does not depend on it")
    parser.add_argument("--device", default="cpu", choices=("gpu", "cpu"))
    options = parser.parse_args()
    from mlxcel_paged import blas

    blas.prepare()
    rows = [measure(options, int(batch)) for batch in options.batches.split(",")]
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "python": sys.version.split()[0],
        "target_rust_us": TARGET_RUST_US,
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=1))
    for row in rows:
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())

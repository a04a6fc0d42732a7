"""The plan benchmark sees the core's calls of a steady step, and only those."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_steady_step_advances_the_plan_once(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    command = [sys.executable, str(BENCHMARKS / "bench_plan_device.py"), "--batches", "3", "--steps", "12"]
    command += ["--warm-up", "4", "--budget-mb", "64", "--prompt-tokens", "5", "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert row["steady_steps"] == 12
    assert row["rust_us"] > 0
    assert row["schedule_us"] > row["advance_us"] > 0
    assert row["calls_per_step"]["DecodePlan.advance"] == 1

"""The plan benchmark times every call of the core in a steady step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mlxcel_paged import _core

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_steady_step_advances_the_plan_once(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    command = [sys.executable, str(BENCHMARKS / "bench_plan_device.py"), "--batches", "3", "--steps", "12"]
    command += ["--warm-up", "4", "--budget-mb", "64", "--prompt-tokens", "5", "--evict-mb", "1", "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert (document["complete"], document["batches_complete"]) == (True, 1)
    (row,) = document["rows"]
    assert row["steady_steps"] == 12
    assert row["rust_us"] > 0
    assert row["raw_us"] > row["rust_us"]
    assert row["schedule_us"] > row["advance_us"] > 0
    steady = {name for name, count in row["calls_per_step"].items() if count == 1}
    assert steady == {"DecodeRows.try_advance", "DeviceMirror.try_sync", "DecodePlan.num_rows"}
    assert set(row["left_out"]) == {"cpu_paged_decode"}


def test_calls_are_timed_whoever_makes_them_and_a_forgotten_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from core_calls import CoreCalls

    pool = _core.PagePool(4)
    acquire = pool.acquire  # bound before the timing functions are there
    timer = CoreCalls()
    timer.install()
    try:
        assert pool.num_free == 4
        pages = pool.acquire(2)
        table = _core.PageTable(pool, 4)
        assert table.append(1).new_pages == [2]
        names = [name for name, _ in timer.take()]
        assert names == ["PagePool.num_free", "PagePool.acquire", "PageTable.append", "Append.new_pages"]
        with timer.profiled() as found:
            pool.release(pages)
            acquire(1)
            _core.simd_level()
        assert found == Counter({"PagePool.acquire": 1, "simd_level": 1})
        assert 0 < timer.calibrate() < 1_000_000
        with pytest.raises(_core.OutOfPagesError):
            pool.acquire(9)
    finally:
        timer.remove()
    assert pool.num_used == 2
    assert timer.take() == []

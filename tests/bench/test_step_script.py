"""The whole-step benchmark runs every arm, pairs processes, and rejects what did not run as it claims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from step_cells import STEP_FUSION, arm_environment  # noqa: E402
from step_report import markdown, summarize  # noqa: E402


def run_script(out: Path, *options: str, environment: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, str(BENCHMARKS / "bench_step_mlx.py"), "--shape", "tiny", "--device", "cpu"]
    command += ["--out", str(out), "--pairs", "1", "--warm-up", "1", "--steps", "2", *options]
    done = subprocess.run(
        command, env={**os.environ, **(environment or {})}, check=False, capture_output=True, text=True
    )
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text())


def test_every_arm_runs_on_its_own_path(tmp_path: Path) -> None:
    status, document = run_script(
        tmp_path / "step.json", "--cells", "1x64,4x64", "--arms", "mlx-lm,fused,gather", "--counter", "off"
    )
    assert [(result["cell"], result["arm"], result["problems"]) for result in document["results"]] == [
        (cell, arm, []) for arm in ("mlx-lm", "fused", "gather") for cell in ("1x64", "4x64")
    ]
    assert status == 0
    for row in document["rows"]:
        assert row["step_ratio"] > 0
        assert row["gather_ratio"] > 0
        assert row["targets"] == {}, "the targets are for the shapes of an 8B model"


@pytest.mark.parametrize(("fusion", "wanted"), [("default", None), ("on", "1"), ("off", "0")])
def test_arms_choose_whether_steps_are_fused(fusion: str, wanted: str | None) -> None:
    """A plain arm never takes our kernels, and mlx-lm is left as it is."""
    chosen = {} if wanted is None else {STEP_FUSION: wanted}
    assert arm_environment("fused", fusion) == arm_environment("gather", fusion) == chosen
    assert arm_environment("fused-plain", fusion) == {STEP_FUSION: "0"}
    assert arm_environment("gather-plain", fusion) == {STEP_FUSION: "0"}
    assert arm_environment("mlx-lm", fusion) == {}


def test_plain_arms_are_compared_with_their_own_path(tmp_path: Path) -> None:
    status, document = run_script(
        tmp_path / "step.json", "--cells", "4x64", "--arms", "fused,fused-plain", "--counter", "off"
    )
    assert status == 0
    assert [result["step_fusion"] for result in document["results"]] == [None, "0"]
    (row,) = document["rows"]
    times = {result["arm"]: result["step_ms"] for result in document["results"]}
    assert row["fusion_ratio"] == pytest.approx(times["fused"] / times["fused-plain"], abs=1e-3)


def test_both_ways_to_read_tokens_are_compared(tmp_path: Path) -> None:
    status, document = run_script(
        tmp_path / "step.json", "--cells", "4x64", "--arms", "fused,fused-tolist", "--counter", "off"
    )
    assert status == 0
    (row,) = document["rows"]
    assert row["ratio_spreads"]["read_ratio"]["pairs"] == 1


def test_a_quantized_model_runs(tmp_path: Path) -> None:
    status, document = run_script(tmp_path / "step.json", "--cells", "4x64", "--arms", "fused", "--bits", "4")
    assert [result["problems"] for result in document["results"]] == [[]]
    assert status == 0


def test_an_arm_on_another_path_is_rejected(tmp_path: Path) -> None:
    status, document = run_script(
        tmp_path / "step.json",
        *("--cells", "1x64", "--arms", "fused", "--counter", "off"),
        environment={"MLXCEL_PAGED_ATTENTION_NATIVE": "0"},
    )
    assert status == 1
    (row,) = document["rows"]
    assert row["arms"]["fused"]["processes"] == 0
    assert "gather:kill_switch" in str(row["arms"]["fused"]["rejected"])


def result(pair: int, arm: str, step_ms: float, **others: Any) -> dict[str, Any]:
    numbers = {"host_ms": 1.0, "device_ms": None, "peak_gb": 10.0, "active_gb": 9.0, "setup_peak_gb": 12.0}
    return {"cell": "4x16K", "arm": arm, "pair": pair, "step_ms": step_ms, "problems": [], **numbers, **others}


def test_ratios_are_taken_within_a_pair() -> None:
    """The machine is twice as slow in the second pair and four times in the third, which lost an arm."""
    results = [
        *(result(0, "mlx-lm", 20.0), result(0, "fused", 5.0, peak_gb=5.0)),
        *(result(1, "mlx-lm", 40.0), result(1, "fused", 10.0, peak_gb=5.0)),
        result(2, "fused", 20.0, peak_gb=5.0),
    ]
    (row,) = summarize(results, 0, with_targets=True)
    assert row["step_ratio"] == 4.0
    assert row["memory_ratio"] == 0.5
    assert row["fusion_ratio"] is None
    assert row["gather_ratio"] is None
    assert {key: verdict["met"] for key, verdict in row["targets"].items()} == {
        "step_ratio": True,
        "gather_ratio": None,
    }
    assert row["ratio_spreads"]["step_ratio"] == {"pairs": 2, "min": 4.0, "max": 4.0}
    assert "4.00, 4.00 to 4.00 in 2 (met, >= 3.6)" in markdown([row])


def test_the_table_shows_how_far_pairs_are_apart() -> None:
    results = [result(pair, "mlx-lm", time) for pair, time in enumerate((20.0, 23.0, 14.0))]
    results += [result(pair, "fused", 5.0) for pair in range(3)]
    (row,) = summarize(results, 0, with_targets=False)
    assert row["ratio_spreads"]["step_ratio"] == {"pairs": 3, "min": 2.8, "max": 4.6}
    assert "| 4.00, 2.80 to 4.60 in 3 |" in markdown([row])


@pytest.mark.parametrize("flaw", [{"problems": ["logits are not finite"]}, {"failed": "out of memory"}])
def test_flawed_results_count_for_nothing(flaw: dict[str, Any]) -> None:
    results = [result(0, "mlx-lm", 20.0), result(0, "fused", 1.0, **flaw), result(1, "mlx-lm", 20.0)]
    results.append(result(1, "fused", 10.0))
    (row,) = summarize(results, 0, with_targets=True)
    assert row["step_ratio"] == 2.0
    assert row["arms"]["fused"]["processes"] == 1
    assert "Rejected: 4x16K fused" in markdown([row])
    assert "**missed**" in markdown([row])

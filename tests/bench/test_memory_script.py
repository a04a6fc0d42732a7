"""The memory benchmark runs both arms on the same prompts and claims nothing for a flawed run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from bench_memory_cuda import markdown, ratios  # noqa: E402


def test_both_arms_answer_the_same_prompts(tmp_path: Path) -> None:
    out = tmp_path / "memory.json"
    command = [sys.executable, str(BENCHMARKS / "bench_memory_cuda.py"), "--shape", "tiny", "--device", "cpu"]
    command += ["--prompt-tokens", "70", "--output-tokens", "5", "--sequences", "3", "--chunk", "32", "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    theirs, ours = document["results"]
    assert (document["complete"], document["arms_complete"]) == (True, 2)
    assert theirs["first_tokens"] == ours["first_tokens"]
    for result in (theirs, ours):
        assert result["problems"] == []
        assert result["num_tokens"] == [5, 5, 5]
        assert result["peak_gb"] == max(result["prompts_peak_gb"], result["decode_peak_gb"]) > result["weights_gb"]
    page_bytes = 2 * 2 * 2 * 32 * 64 * 4  # layers, keys and values, heads, tokens, head_dim, f32
    assert ours["pools_gb"] == round(3 * 3 * page_bytes / 1e9, 3)
    assert ours["prefill_chunk"] == 32
    assert document["ratio"]["peak"] > 0
    assert document["ratio"]["met"] is None, "the target is for the shapes of an 8B model"


def result(arm: str, peak_gb: float, **others: Any) -> dict[str, Any]:
    return {"arm": arm, "peak_gb": peak_gb, "beyond_weights_gb": peak_gb - 16, "problems": [], **others}


@pytest.mark.parametrize(("peak_gb", "met"), [(30.0, True), (31.0, False)])
def test_the_target_is_of_the_whole_peak(peak_gb: float, met: bool) -> None:
    results = [result("mlx-lm", 50.0), result("ours", peak_gb)]
    found = ratios(results, with_target=True)
    assert (found["peak"], found["met"]) == (peak_gb / 50, met)
    assert found["beyond_weights"] == round((peak_gb - 16) / 34, 3)
    assert ("**missed**" in markdown(results, found)) is not met


@pytest.mark.parametrize("flaw", [{"problems": ["decode took other paths"]}, {"failed": "out of memory"}])
def test_a_flawed_arm_gives_no_ratio(flaw: dict[str, Any]) -> None:
    results = [result("mlx-lm", 50.0), result("ours", 20.0, **flaw)]
    found = ratios(results, with_target=True)
    assert (found["peak"], found["met"]) == (None, None)
    assert "Rejected: ours" in markdown(results, found)

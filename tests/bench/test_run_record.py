"""What the JSON of a run begins with, and whether it says that the run has ended."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_prefill_cuda  # noqa: E402
import bench_step_mlx  # noqa: E402
from run_record import write_run  # noqa: E402


def test_a_run_begins_with_what_made_it(tmp_path: Path) -> None:
    document = write_run(tmp_path / "run.json", {"shape": "tiny"}, complete=True)
    assert list(document) == ["date", "command", "device", "num_cores", "python", "versions", "complete", "shape"]
    assert document["versions"]["mlx"] == version("mlx")
    assert json.loads((tmp_path / "run.json").read_text()) == document


def test_a_run_into_a_new_folder_is_not_lost(tmp_path: Path) -> None:
    """It is written when all has been measured."""
    out = tmp_path / "new" / "folder" / "run.json"
    document = write_run(out, {}, complete=True)
    assert json.loads(out.read_text()) == document


@pytest.mark.parametrize("script", [bench_step_mlx, bench_prefill_cuda])
def test_a_run_in_progress_is_not_complete(script: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is written is looked at, in the order in which it is written; the arms themselves are not run."""
    written = []

    def write(out: Path, document: dict, *, complete: bool) -> dict:
        written.append((complete, document["pairs_complete"], document["note"]))
        return write_run(out, document, complete=complete)

    monkeypatch.setattr(script, "write_run", write)
    monkeypatch.setattr(script, "run_arm", lambda *_: [])
    command = ["script", "--out", str(tmp_path / "run.json"), "--device", "cpu", "--shape", "tiny", "--pairs", "2"]
    monkeypatch.setattr(sys, "argv", [*command, *(["--counter", "off"] if script is bench_step_mlx else [])])
    assert script.main() == 0  # type: ignore[attr-defined]
    *before, last = dict.fromkeys(written)
    assert last == (True, 2, "complete")
    assert before[-1] == (False, 2, "2 of 2 pairs: in progress")
    assert (False, 1, "1 of 2 pairs: in progress") in before
    assert not any(complete for complete, _, _ in before)
    document = json.loads((tmp_path / "run.json").read_text())
    assert (document["complete"], document["pairs_wanted"]) == (True, 2)


def test_the_report_names_runs_that_are_not_complete(tmp_path: Path) -> None:
    for name, note in (("a", "complete"), ("b", "1 of 5 pairs: in progress")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"note": note, "bits": 0, "results": []}))
    command = [sys.executable, str(BENCHMARKS / "bench_step_mlx.py"), "--report", "a.json", "b.json"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "b.json: 1 of 5 pairs: in progress" in done.stdout
    assert "a.json" not in done.stdout

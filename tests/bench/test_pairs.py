"""Processes that take turns: what a worker measured before it died counts, and the time limit is kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import pairs

WORKER = """
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
for name in ("--arm", "--out", "--num-steps"):
    parser.add_argument(name)
options = parser.parse_args()
with open(options.out, "a") as out:
    result = {"cell": "a", "arm": options.arm, "steps": options.num_steps, "seen": os.getenv("SEEN")}
    print(json.dumps(result), file=out)
{ending}
"""


def run(folder: Path, ending: str, **options: Any) -> list[dict[str, Any]]:
    script = folder / "worker.py"
    script.write_text(WORKER.replace("{ending}", ending))
    return pairs.run_worker(
        script,
        {"num_steps": 7},
        arm="x",
        out=folder / "out.jsonl",
        key="cell",
        wanted=["a", "b"],
        **{"timeout_s": 30, **options},
    )


def test_results_are_made_anew_each_time(tmp_path: Path) -> None:
    wanted = [{"cell": "a", "arm": "x", "steps": "7", "seen": None}]
    assert run(tmp_path, "") == wanted
    assert run(tmp_path, "") == wanted
    assert run(tmp_path, "", environment={"SEEN": "yes"})[0]["seen"] == "yes"


@pytest.mark.parametrize(
    ("ending", "timeout_s", "cause"),
    [("sys.exit('no memory')", 30, "status 1: no memory"), ("time.sleep(60)", 1, "did not end within 1 s")],
)
def test_what_was_measured_before_the_end_counts(tmp_path: Path, ending: str, timeout_s: float, cause: str) -> None:
    measured, missing = run(tmp_path, ending, timeout_s=timeout_s)
    assert measured["steps"] == "7"
    assert (missing["cell"], missing["arm"]) == ("b", "x")
    assert cause in missing["failed"]


def test_no_pair_is_begun_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pairs.time, "monotonic", lambda: now)
    turns = pairs.Pairs(5, 60)
    seen = []
    for pair in turns:
        seen.append((pair, turns.worker_s()))
        now += 25
        turns.finish_pair()
    assert seen == [(0, 60), (1, pytest.approx(35))]
    assert turns.progress() == {
        "note": "2 of 5 pairs: the time limit of 60 s",
        "pairs_complete": 2,
        "pairs_wanted": 5,
    }
    assert not turns.is_complete
    now += 100
    assert turns.worker_s() == pairs.MIN_WORKER_S


def test_a_run_is_complete_when_all_pairs_were_run_and_not_before() -> None:
    turns = pairs.Pairs(3, 60)
    assert turns.progress()["note"] == "0 of 3 pairs: in progress"
    for pair in turns:
        assert turns.progress()["pairs_complete"] == pair
        turns.finish_pair()
        assert not turns.is_complete
        assert turns.progress()["note"] == f"{pair + 1} of 3 pairs: in progress"
    assert turns.is_complete
    assert turns.progress() == {"note": "complete", "pairs_complete": 3, "pairs_wanted": 3}


def test_a_pair_that_was_not_finished_is_missed() -> None:
    turns = pairs.Pairs(2, 60)
    for pair in turns:
        if pair:
            turns.finish_pair()
    assert not turns.is_complete
    assert turns.progress()["note"] == "1 of 2 pairs: ended"

"""What counts as an arm's own path, how arms compare, and what is reported as a problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxcel_paged.bench.serve import report
from mlxcel_paged.bench.serve.arms import is_own_path
from mlxcel_paged.bench.serve.record import RequestRecord
from mlxcel_paged.bench.serve.scrape import ServerCounts
from mlxcel_paged.bench.serve.summary import arm_ratios, notes, problems, summarize
from mlxcel_paged.bench.serve.turn import Turn
from mlxcel_paged.bench.serve.workload import SyntheticWorkload

WORKLOAD = SyntheticWorkload(2, 16, 5, 2, float("inf"), 0)


@pytest.mark.parametrize(
    ("arm", "launches", "num_pages", "expected"),
    [
        ("fused", {"fused": 3}, 8, True),
        ("fused", {"fused": 3, "gather:kill_switch": 1}, 8, False),
        ("fused", {"gather:unsupported_shape": 3}, 8, False),
        ("fused", {}, 8, False),
        ("gather", {"gather:kill_switch": 3, "gather:forced": 1}, 8, True),
        ("gather", {"fused": 1, "gather:kill_switch": 3}, 8, False),
        ("gather", {}, 0, False),
        ("dense", {}, 0, True),
        ("dense", {"fused": 1}, 8, False),
        ("dense", {}, 8, False),
        ("server", {"fused": 1, "gather:kill_switch": 1}, 8, True),
    ],
)
def test_own_path(arm: str, launches: dict[str, int], num_pages: int, expected: bool) -> None:
    assert is_own_path(arm, launches, num_pages=num_pages) is expected


def turn(arm: str, number: int, step_s: float, *, texts: str = "xy", on_own_path: bool = True) -> Turn:
    records = [RequestRecord(16, 0.0, [1 + step_s * index for index in range(5)], 5, text) for text in texts]
    counts = ServerCounts({} if arm == "dense" else {arm: 60}, 8, 5, 2.0, 1.9)
    return Turn(arm, number, "m", records, 1 + 4 * step_s, counts, on_own_path)


def alternating(steps_s: dict[str, tuple[float, ...]], **fields: Any) -> list[Turn]:
    return [turn(arm, n, step_s, **fields) for arm, steps in steps_s.items() for n, step_s in enumerate(steps, start=1)]


def test_arms_are_compared_turn_by_turn() -> None:
    # The machine slows down between turns; the ratio of a turn does not.
    turns = alternating({"dense": (0.2, 0.4, 0.8), "fused": (0.1, 0.2, 0.5)})
    (ratio,) = arm_ratios(WORKLOAD, ("dense", "fused"), turns)
    assert (ratio["of"], ratio["to"], ratio["metric"]) == ("fused", "dense", "decode_throughput")
    assert ratio["turns"] == pytest.approx([2.0, 2.0, 1.6])
    assert ratio["ratio"] == pytest.approx(2.0)


def test_arms_without_a_decode_window_are_compared_by_output() -> None:
    turns = alternating({"dense": (0.2,), "fused": (0.1,)})
    for one in turns:
        one.records[0].error = "HTTP 429"
    (ratio,) = arm_ratios(WORKLOAD, ("dense", "fused"), turns)
    assert ratio["metric"] == "output_throughput"
    assert ratio["ratio"] == pytest.approx(1.8 / 1.4)


def test_result_is_over_all_turns_and_keeps_each() -> None:
    turns = alternating({"dense": (0.2, 0.2, 0.2), "fused": (0.1, 0.2, 0.5)})
    result = summarize(WORKLOAD, "fused", turns, {})
    assert result["decode_throughput"] == pytest.approx(10.0)
    assert [one["decode_throughput"] for one in result["turns"]] == pytest.approx([20.0, 10.0, 4.0])
    assert result["launches"] == {"fused": 180}
    assert result["completed"] == 6
    assert result["outside_model_percent"] == pytest.approx(5.0)
    assert result["outside_model_ms_per_step"] == pytest.approx(20.0)
    assert result["duration"] == pytest.approx(1.4 + 1.8 + 3.0)
    assert (result["context"], result["output_len"], result["max_concurrency"]) == (16, 5, 2)


def find(turns: list[Turn], *, check_tokens: bool = True, allow_failures: bool = False) -> list[str]:
    arms = ("dense", "fused")
    return problems(WORKLOAD, arms, turns, check_tokens=check_tokens, allow_failures=allow_failures)


def test_nothing_is_wrong_with_a_good_run() -> None:
    assert find(alternating({"dense": (0.2, 0.4), "fused": (0.1, 0.2)})) == []


def test_turns_without_a_decode_window_are_noted() -> None:
    turns = alternating({"dense": (0.2, 0.4), "fused": (0.1, 0.2)})
    assert notes(WORKLOAD, ("dense", "fused"), turns) == []
    turns[3].records[0].chunk_times = [90.0, 91.0]
    (note,) = notes(WORKLOAD, ("dense", "fused"), turns)
    assert "in 1 of 2 turns of arm fused not all clients decoded at one time" in note


def test_another_path_is_a_problem_even_once() -> None:
    turns = [
        turn("dense", 1, 0.1),
        turn("fused", 1, 0.1),
        turn("dense", 2, 0.1),
        turn("fused", 2, 0.1, on_own_path=False),
    ]
    (problem,) = find(turns)
    assert "arm fused did not run on its own path" in problem


def test_failed_requests_are_a_problem_unless_allowed() -> None:
    turns = alternating({"dense": (0.2,), "fused": (0.1,)})
    turns[1].records[1].error = "HTTP 429: queue_full"
    assert find(turns, allow_failures=True) == []
    (problem,) = find(turns)
    assert "1 requests of arm fused failed: HTTP 429" in problem


def test_differing_answers_are_a_problem_when_asked_for() -> None:
    turns = [turn("dense", 1, 0.1), turn("fused", 1, 0.1), turn("dense", 2, 0.1), turn("fused", 2, 0.1, texts="xz")]
    assert find(turns, check_tokens=False) == []
    (problem,) = find(turns)
    assert "1 of 4 answers of arm fused differ from arm dense, the first in request 1 of turn 2" in problem


def document() -> dict[str, Any]:
    turns = alternating({"dense": (0.2, 0.2), "fused": (0.1, 0.1)})
    arms = ("dense", "fused")
    machine = {"date": "d", "system": "s", "processor": "p", "num_cores": 2, "simd": "x", "versions": {"mlx": "1"}}
    return {
        "environment": machine,
        "model": "m",
        "command": "mlxcel-paged bench serve",
        "results": [summarize(WORKLOAD, arm, turns, {}) for arm in arms],
        "ratios": arm_ratios(WORKLOAD, arms, turns),
        "notes": [],
        "problems": ["something"],
    }


def test_report_has_json_markdown_and_plots(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    written = report.write_report(document(), folder)
    assert {path.name for path in written} == {"serve.json", "serve.md", "throughput.png", "latency.png"}
    assert json.loads((folder / "serve.json").read_text()) == document()
    text = (folder / "serve.md").read_text()
    assert "| 2 x 16+5 | fused | 20.0 |" in text
    assert "fused / dense = 2.00 in decode throughput (turns: 2.00, 2.00)" in text
    assert "* something" in text
    for name in ("throughput.png", "latency.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in text


def test_report_without_a_single_answer(tmp_path: Path) -> None:
    turns = alternating({"dense": (0.2,), "fused": (0.1,)})
    for one in turns:
        for record in one.records:
            record.error = "HTTP 500"
    broken = {**document(), "results": [summarize(WORKLOAD, "fused", turns, {})], "ratios": []}
    report.write_report(broken, tmp_path)
    assert "0/2" in (tmp_path / "serve.md").read_text()

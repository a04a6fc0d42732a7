"""The count of graph instantiations runs the engine's steps and blames the right turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import count_graphs  # noqa: E402
from count_graphs import attribute, cause_of_death, remarks, verdicts  # noqa: E402
from cupti_trace import MEMCPY, MIGRATION, Record  # noqa: E402


@pytest.mark.skipif(sys.platform != "linux", reason="the graph counter is preloaded")
def test_requests_come_and_go_while_steps_are_counted(tmp_path: Path) -> None:
    out = tmp_path / "graphs.json"
    command = [sys.executable, str(BENCHMARKS / "count_graphs.py"), "--shape", "tiny", "--device", "cpu"]
    command += ["--steps", "150", "--batch", "4", "--budget-mb", "64", "--modes", "driver", "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    (result,) = document["results"]
    assert result["turns"]["steady"] > 100
    assert result["turns"]["changed"] > 2
    assert result["page_crossings"] > 2
    assert result["requests_finished"] > 2
    assert set(result["launches"]) == {"fused"}
    assert document["complete"] is True
    assert set(document["targets"].values()) == {None}, "no graph was launched, so nothing may be claimed"


def test_migrations_count_for_the_turn_they_happen_in() -> None:
    """A turn is steady only if the two before it were: kernels run behind the host."""
    records = [
        Record(MIGRATION, 1, 4096, 150, None),  # turn 0, the change itself
        Record(MIGRATION, 1, 64, 250, None),  # turns 1 and 2 settle
        Record(MEMCPY, 1, 8, 399, None),
        Record(MIGRATION, 2, 16, 401, None),  # turn 3 is steady
        Record(MIGRATION, 3, 0xDEADBEEF, 450, None),  # one fault at that address
    ]
    trace = SimpleNamespace(records=lambda: iter(records))
    sums = attribute(trace, [100, 200, 300, 400], ["changed", "steady", "steady", "steady"])
    assert dict(sums["changed"]) == {"turns": 3, "migrated_htod_bytes": 4160, "copied_htod_bytes": 8, "copies_htod": 1}
    assert dict(sums["steady"]) == {"turns": 1, "migrated_dtoh_bytes": 16, "cpu_page_faults": 1}


def driver(**steady: int) -> dict[str, object]:
    return {"mode": "driver", "counted": {"steady": {"graph_launches": 9, **steady}, "changed": {}}}


@pytest.mark.parametrize(
    ("result", "wanted"),
    [
        (driver(), (True, True)),
        (driver(graph_instantiations=1), (False, True)),
        (driver(htod_bytes=4), (True, False)),
        (driver(graph_launches=0), (None, None)),
        ({"mode": "driver", "failed": "no device"}, (None, None)),
    ],
)
def test_a_target_is_met_only_by_what_was_counted(
    result: dict[str, object], wanted: tuple[bool | None, bool | None]
) -> None:
    found = verdicts([result])
    assert (found["no_instantiation"], found["nothing_copied_up"]) == wanted
    assert found["nothing_migrated_up"] is None


@pytest.mark.parametrize(
    ("migrations", "steady", "wanted"),
    [
        ("counted", {}, True),
        ("counted", {"migrated_dtoh_bytes": 4}, True),
        ("counted", {"migrated_htod_bytes": 4}, False),
        ("counted", {"copied_htod_bytes": 4}, False),
        ("CUPTI refuses unified memory counters: status 29", {}, None),
    ],
)
def test_migrations_are_judged_only_where_they_are_counted(
    migrations: str, steady: dict[str, int], wanted: bool | None
) -> None:
    result = {"mode": "cupti", "migrations": migrations, "counted": {"steady": steady, "changed": {}}}
    assert verdicts([result])["nothing_migrated_up"] is wanted


@pytest.mark.parametrize(
    ("steady", "only_read"),
    [
        ({}, True),
        ({"managed_allocs": 2, "managed_alloc_bytes": 64, "undirected_copies": 2, "undirected_bytes": 64}, True),
        ({"managed_allocs": 3, "managed_alloc_bytes": 96, "undirected_copies": 2, "undirected_bytes": 64}, False),
    ],
)
def test_an_upload_is_a_managed_allocation_without_a_copy(steady: dict[str, int], only_read: bool) -> None:
    result = {**driver(**steady), "turns": {"steady": 7, "changed": 1}}
    assert verdicts([result])["managed_memory_only_read"] is only_read
    (remark,) = remarks([result])
    assert ("filled by the host" in remark) is not only_read


def test_a_dead_process_says_how_far_it_came(tmp_path: Path) -> None:
    code = "import os, signal, sys; print('stage: counting', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert cause_of_death(done.returncode, done.stderr) == "killed by SIGSEGV during counting"
    assert cause_of_death(1, "ImportError: no") == "ended with status 1 during start: ImportError: no"


PROFILED = """
import json, os, signal, sys
from pathlib import Path
mode = sys.argv[sys.argv.index("--mode") + 1]
migrations = sys.argv[sys.argv.index("--migrations") + 1]
with Path({log!r}).open("a") as log:
    print(mode, migrations, file=log)
num_starts = len([line for line in Path({log!r}).read_text().splitlines() if line.startswith("cupti")])
print("stage: counting", file=sys.stderr, flush=True)
if mode == "cupti" and num_starts <= {num_deaths}:
    os.kill(os.getpid(), {signal})
counted = {{"steady": {{"graph_launches": 9}}, "changed": {{}}}}
turns = {{"steady": 5, "changed": 1}}
result = {{"mode": mode, "migrations": "counted", "counted": counted, "turns": turns, "turns_wanted": 6}}
print(json.dumps(result))
"""


def run_modes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, num_deaths: int, number: int = signal.SIGSEGV
) -> tuple[int, dict[str, Any], list[str]]:
    """The script over processes of which the first with CUPTI die: its status, its JSON, and what was started."""
    log, out = folder / "log", folder / "graphs.json"
    (folder / "process.py").write_text(PROFILED.format(log=str(log), num_deaths=num_deaths, signal=int(number)))
    monkeypatch.setattr(count_graphs.graph_counter, "build", lambda folder: folder)
    monkeypatch.setattr(count_graphs.graph_counter, "preload", lambda _: dict(os.environ))
    monkeypatch.setattr(count_graphs, "SCRIPT", folder / "process.py")
    monkeypatch.setattr(sys, "argv", ["script", "--device", "cpu", "--modes", "driver,cupti", "--out", str(out)])
    status = count_graphs.main()
    return status, json.loads(out.read_text()), log.read_text().splitlines()


def test_a_profiler_that_kills_its_process_is_run_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, document, started = run_modes(tmp_path, monkeypatch, num_deaths=1)
    assert started == ["driver on", "cupti on", "cupti on"]
    _, cupti = document["results"]
    (first,) = cupti["retried"]
    assert first["signal"] == "SIGSEGV"
    assert first["failed"].startswith("killed by SIGSEGV during counting")
    assert cupti["migrations"] == "counted"
    assert "failed" not in cupti
    assert document["targets"]["nothing_migrated_up"] is True
    assert status == 0


def test_after_the_second_death_migrations_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, document, started = run_modes(tmp_path, monkeypatch, num_deaths=2)
    assert started == ["driver on", "cupti on", "cupti on", "cupti off"]
    _, cupti = document["results"]
    assert cupti["migrations"].startswith("with their records: killed by SIGSEGV")
    assert len(cupti["retried"]) == 1
    assert document["targets"]["nothing_migrated_up"] is None
    assert status == 0


def test_a_profiler_that_always_dies_leaves_the_other_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, document, started = run_modes(tmp_path, monkeypatch, num_deaths=9, number=signal.SIGBUS)
    assert len(started) == 4
    driver_result, cupti = document["results"]
    assert driver_result["counted"]["steady"]["graph_launches"] == 9
    assert (cupti["mode"], cupti["signal"]) == ("cupti", "SIGBUS")
    assert cupti["failed"].startswith("killed by SIGBUS during counting")
    assert document["targets"]["no_instantiation"] is True
    assert document["complete"] is True, "both modes were run"
    assert status == 1


def test_the_first_result_is_written_before_the_second_mode_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "graphs.json"
    seen = {}

    def cupti(*_: object) -> dict[str, Any]:
        seen.update(json.loads(out.read_text()))
        return {"mode": "cupti", "failed": "no CUPTI"}

    monkeypatch.setattr(count_graphs, "run_cupti", cupti)
    run_modes(tmp_path, monkeypatch, num_deaths=0)
    assert (seen["complete"], seen["modes_complete"], seen["modes_wanted"]) == (False, 1, 2)
    assert [result["mode"] for result in seen["results"]] == ["driver"]


@pytest.mark.skipif(sys.platform != "linux", reason="the graph counter is preloaded")
def test_time_that_runs_out_leaves_what_was_counted(tmp_path: Path) -> None:
    out = tmp_path / "graphs.json"
    command = [sys.executable, str(BENCHMARKS / "count_graphs.py"), "--shape", "tiny", "--device", "cpu"]
    command += ["--steps", "1000000", "--batch", "2", "--budget-mb", "64", "--modes", "driver"]
    done = subprocess.run([*command, "--time-limit-s", "20", "--out", str(out)], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    document = json.loads(out.read_text())
    assert (document["complete"], document["modes_complete"]) == (False, 1)
    (result,) = document["results"]
    assert 0 < sum(result["turns"].values()) < result["turns_wanted"] == 1000000

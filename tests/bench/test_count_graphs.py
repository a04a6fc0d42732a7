"""The count of graph instantiations runs the engine's steps and blames the right turns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

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


@pytest.mark.skipif(sys.platform != "linux", reason="the graph counter is preloaded")
def test_time_that_runs_out_leaves_what_was_counted(tmp_path: Path) -> None:
    out = tmp_path / "graphs.json"
    command = [sys.executable, str(BENCHMARKS / "count_graphs.py"), "--shape", "tiny", "--device", "cpu"]
    command += ["--steps", "1000000", "--batch", "2", "--budget-mb", "64", "--modes", "driver"]
    done = subprocess.run([*command, "--time-limit-s", "20", "--out", str(out)], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    (result,) = json.loads(out.read_text())["results"]
    assert 0 < sum(result["turns"].values()) < result["turns_wanted"] == 1000000

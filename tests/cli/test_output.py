"""With --json, stdout holds one JSON document and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mlxcel_paged.cli.output import json_document


def _run(script: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.returncode == status, finished.stderr
    return finished


def test_prints_of_libraries_do_not_reach_stdout() -> None:
    finished = _run(
        "import os\nfrom mlxcel_paged.cli.output import json_document\n"
        "with json_document(True) as write:\n"
        "    print('a library prints')\n"
        "    os.write(1, b'a C library prints')\n"
        "    write({'answer': 42})\n"
    )
    assert json.loads(finished.stdout) == {"answer": 42}
    assert "a library prints" in finished.stderr
    assert "a C library prints" in finished.stderr


def test_error_inside_leaves_stdout_empty() -> None:
    finished = _run(
        "from mlxcel_paged.cli.output import json_document\n"
        "with json_document(True) as write:\n"
        "    write({'half': 'done'})\n"
        "    raise SystemExit(3)\n",
        status=3,
    )
    assert finished.stdout == ""


def test_nan_is_not_json() -> None:
    with pytest.raises(ValueError, match="JSON"), json_document(True) as write:
        write({"value": float("nan")})


def test_bench_plan_prints_one_document() -> None:
    command = [sys.executable, "-m", "mlxcel_paged", "bench", "plan", "--json", "--batch", "4", "--context", "1024"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    (case,) = json.loads(finished.stdout)["cases"]
    assert (case["batch"], case["context"]) == (4, 1024)
    assert min(case[name] for name in ("advance_ns", "crossing_one_ns", "crossing_all_ns", "rebuild_ns")) > 0

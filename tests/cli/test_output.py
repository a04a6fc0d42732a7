"""With --json, stdout holds one JSON document and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mlxcel_paged.cli.output import json_document


def test_prints_of_libraries_do_not_reach_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with json_document(True) as write:
        print("a library prints")
        os.write(1, b"a C library prints\n")
        write({"answer": 42})
    out, err = capfd.readouterr()
    assert json.loads(out) == {"answer": 42}
    assert "a library prints" in err
    assert "a C library prints" in err


def test_error_inside_leaves_stdout_empty_and_usable(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), json_document(True) as write:  # noqa: PT012
        write({"half": "done"})
        raise ZeroDivisionError
    print("later")
    assert capfd.readouterr().out == "later\n"


def test_nan_is_not_json() -> None:
    with pytest.raises(ValueError, match="JSON"), json_document(True) as write:
        write({"value": float("nan")})


def test_bench_plan_prints_one_document() -> None:
    command = [sys.executable, "-m", "mlxcel_paged", "bench", "plan", "--json", "--batch", "4", "--context", "1024"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    (case,) = json.loads(finished.stdout)["cases"]
    assert (case["batch"], case["context"]) == (4, 1024)
    assert min(case[name] for name in ("advance_ns", "crossing_one_ns", "crossing_all_ns", "rebuild_ns")) > 0

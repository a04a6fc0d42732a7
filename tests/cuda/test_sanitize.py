"""The set that compute-sanitizer sees, and what is made of what it says; a script stands in for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sanitize
from decode_shapes import HEAD_DIMS, Case
from sanitized_set import CHOSEN, PageWrite, sanitized

from mlxcel_paged.kernels_cuda import KernelVariant, balanced_work_list

DECODE = [case for case in CHOSEN if isinstance(case, Case)]


def is_split(case: Case) -> bool:
    variant = KernelVariant.for_shape(
        head_dim=case.head_dim,
        group_size=case.group_size,
        dtype=case.dtype,  # type: ignore[arg-type]
        architecture="sm_90a",
    )
    work = balanced_work_list(
        case.lengths,
        num_workers=case.num_workers,
        quantum=variant.num_warps * 16,
        offsets=case.offsets,
        window=case.window,
        num_splits=case.num_splits,
    )
    return work.num_partial_rows > 0


def test_every_way_through_the_kernels_is_in_the_set() -> None:
    assert len(CHOSEN) == 24
    assert {case.head_dim for case in DECODE} == set(HEAD_DIMS)
    assert {case.group_size for case in DECODE} >= {1, 4, 8, 16}
    assert {case.page_size for case in DECODE} >= {8, 16, 64, 128}
    assert {case.layout for case in DECODE} == {"HND", "NHD"}
    for dtype in ("float16", "bfloat16"):
        cases = [case for case in DECODE if case.dtype == dtype]
        assert any(case.window for case in cases)
        assert any(case.with_sinks for case in cases)
        assert any(case.logits_soft_cap for case in cases)
        assert any(case.append and max(case.lengths) > 0 for case in cases)
        assert any(0 in case.lengths for case in cases)
        assert any(map(is_split, cases))
        assert not all(map(is_split, cases))
    assert any(case.offsets for case in DECODE)
    assert {case.head_dim * 2 % 16 for case in CHOSEN if isinstance(case, PageWrite)} == {0, 6}
    assert all(case.label for case in CHOSEN)


def test_random_launches_follow_the_chosen() -> None:
    assert sanitized(3) == list(CHOSEN[:3])
    more = sanitized(27)
    assert more[:24] == list(CHOSEN)
    assert len({str(case) for case in more}) == 27


SANITIZER = """#!{python}
import os, sys, time
tool, (worker, cases) = sys.argv[2], sys.argv[-2:]
assert sys.argv[1:5] == ["--tool", tool, "--error-exitcode", "9"] and worker.endswith("sanitize_worker.py")
print("========= COMPUTE-SANITIZER")
for number in range({num_done}):
    print(f"case {{number + 1}} of {{cases}}, 0.1 s: D64", flush=True)
{then}
"""
CLEAN = """
clean = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors)"}
print("=========", clean[tool])
"""


def run_tool(
    folder: Path, then: str, *, tool: str = "memcheck", num_done: int = 3, time_limit_s: float = 60
) -> sanitize.Outcome:
    script = folder / "compute-sanitizer"
    script.write_text(SANITIZER.format(python=sys.executable, num_done=num_done, then=then))
    script.chmod(0o755)
    return sanitize.run_tool(str(script), tool, 3, time_limit_s)


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_a_clean_run_has_no_problems(tool: str, tmp_path: Path) -> None:
    outcome = run_tool(tmp_path, CLEAN, tool=tool)
    assert (outcome.tool, outcome.num_cases, outcome.problems) == (tool, 3, [])


@pytest.mark.parametrize(
    ("then", "num_done", "problems"),
    [
        ("print('========= ERROR SUMMARY: 2 errors'); sys.exit(9)", 3, ["error summary: 2 errors"]),
        ("print('========= ERROR SUMMARY: 1 error')", 3, ["error summary: 1 error"]),
        (
            "print('========= RACECHECK SUMMARY: 4 hazards displayed (0 errors, 4 warnings)')",
            3,
            ["racecheck summary: 4 hazards displayed"],
        ),
        (CLEAN, 2, ["2 of 3 cases ended"]),
        ("print('wrong: output error'); " + CLEAN.strip(), 3, ["wrong: output error"]),
        (CLEAN + "sys.exit(1)", 3, ["status 1"]),
        ("print('no device')", 3, ["the tool gave no summary: case 2 of 3, 0.1 s: D64 / case 3 of 3, 0.1 s: D64 / "]),
    ],
)
def test_what_is_not_clean_is_said(tmp_path: Path, then: str, num_done: int, problems: list[str]) -> None:
    found = run_tool(tmp_path, then, num_done=num_done).problems
    assert len(found) == len(problems)
    assert all(text.startswith(wanted) for text, wanted in zip(found, problems, strict=True))


def test_a_run_that_is_cut_off_is_not_clean(tmp_path: Path) -> None:
    outcome = run_tool(tmp_path, CLEAN + "sys.stdout.flush(); time.sleep(600)", num_done=2, time_limit_s=1.5)
    assert outcome.num_cases == 2
    assert outcome.problems == ["ended by the time limit of 2 s after 2 of 3 cases"]
    assert outcome.seconds < 60


def test_without_the_sanitizer_the_script_says_so(tmp_path: Path) -> None:
    if sanitize.find_sanitizer():
        pytest.skip("compute-sanitizer is here")
    environment = {**os.environ, "PATH": str(tmp_path)}
    command = [sys.executable, str(Path(sanitize.__file__))]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("cannot run here: compute-sanitizer is neither on PATH")

"""compute-sanitizer over a small set of launches of our CUDA kernels: memcheck and racecheck, at the same time.

    python tests/cuda/sanitize.py                              # the chosen launches, under two minutes on an H200
    python tests/cuda/sanitize.py --cases 8                    # the first of them
    python tests/cuda/sanitize.py --cases 200 --tools memcheck # random ones behind them

Needs torch, an NVIDIA GPU and compute-sanitizer, which comes with NVIDIA's CUDA toolkit. Every launch's result is
checked as well. Status 0: all launches ran and neither tool found anything. 1: something was found, or the time limit
came first. 2: something is missing here.

Under memcheck torch gives every tensor memory of its own, so that an access beside a tensor is seen.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sanitized_set import CHOSEN

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))

from gpu_needs import end, require_torch_gpu  # noqa: E402

WORKER = HERE / "sanitize_worker.py"
TOOLS = ("memcheck", "racecheck")
TIME_LIMIT_S = 110.0
FOUND_STATUS = 9
_ENVIRONMENT = {"memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed)")
_MAX_SHOWN_LINES = 60
_RUNNING: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one tool saw.

    Attributes:
        num_cases: Launches that ended.
        problems: Why this is no clean run; empty if it is one.
        report: The tool's own lines.
    """

    tool: str
    num_cases: int
    seconds: float
    problems: list[str]
    report: list[str]


def find_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def run_tool(sanitizer: str, tool: str, num_cases: int, time_limit_s: float) -> Outcome:
    """One tool over the launches, in a process of its own that is ended at the limit."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND_STATUS), sys.executable, str(WORKER)]
    began = time.monotonic()
    is_late = threading.Event()
    lines: list[str] = []
    with subprocess.Popen(
        [*command, str(num_cases)],
        env={**os.environ, **_ENVIRONMENT.get(tool, {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # it is killed with the process that it watches
    ) as process:
        assert process.stdout is not None
        _RUNNING.add(process)

        def kill() -> None:
            is_late.set()
            _kill(process)

        timer = threading.Timer(time_limit_s, kill)
        timer.start()
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith(("case ", "wrong: ")):
                print(f"{tool:10} {line.rstrip()}", flush=True)
        process.wait()
        timer.cancel()
        _RUNNING.discard(process)
    num_done = sum(line.startswith("case ") for line in lines)
    problems = _problems(lines, process.returncode, num_done, num_cases)
    if is_late.is_set():
        late = f"ended by the time limit of {time_limit_s:.0f} s after {num_done} of {num_cases} cases"
        problems = [late, *_wrong(lines)]
    report = [line for line in lines if line.startswith("=====")]
    return Outcome(tool, num_done, time.monotonic() - began, problems, report)


def _end_with_tools(number: int, _frame: object) -> None:
    """Whoever ends this process ends the tools, which are in sessions of their own."""
    for process in list(_RUNNING):
        _kill(process)
    os._exit(128 + number)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _problems(lines: list[str], status: int, num_done: int, num_cases: int) -> list[str]:
    problems = _wrong(lines)
    summaries = [match for line in lines if (match := _SUMMARY.search(line))]
    if not summaries:
        problems.append("the tool gave no summary: " + " / ".join(lines[-3:]))
    elif any(int(match[1] or match[2]) for match in summaries):
        problems += [match[0].lower() for match in summaries]
    if num_done != num_cases:
        problems.append(f"{num_done} of {num_cases} cases ended")
    if status and not problems:
        problems.append(f"status {status}")
    return problems


def _wrong(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("wrong: ")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=len(CHOSEN), help="launches; random ones beyond the chosen")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--time-limit-s", type=float, help="of a tool; 110, and more with random cases")
    options = parser.parse_args()
    tools = options.tools.split(",")
    if unknown := set(tools) - set(TOOLS):
        parser.error(f"--tools: unknown {', '.join(sorted(unknown))}; known: {', '.join(TOOLS)}")
    if options.cases < 1:
        parser.error("--cases must be at least 1")
    time_limit_s = options.time_limit_s or TIME_LIMIT_S * max(1.0, options.cases / len(CHOSEN))
    sanitizer = find_sanitizer()
    if sanitizer is None:
        end(
            "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin"
            " (hint: it is part of NVIDIA's CUDA toolkit; its package is cuda-sanitizer-<version>)"
        )
    require_torch_gpu()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_with_tools)
    with ThreadPoolExecutor(len(tools)) as pool:
        outcomes = list(pool.map(lambda tool: run_tool(sanitizer, tool, options.cases, time_limit_s), tools))
    for outcome in outcomes:
        if outcome.problems:
            print(*outcome.report[:_MAX_SHOWN_LINES], sep="\n")
    for outcome in outcomes:
        verdict = "; ".join(outcome.problems) or "nothing found"
        print(f"{outcome.tool}: {outcome.num_cases} of {options.cases} cases in {outcome.seconds:.0f} s: {verdict}")
    return 1 if any(outcome.problems for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

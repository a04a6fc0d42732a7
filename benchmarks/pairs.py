"""Arms that take turns, each in a process of its own that may die.

A pair is one process of each arm, next to each other in time. A worker writes one JSON object a line to the file it is
given, each as soon as it is measured, so that what it measured before it died counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# A worker gets as long, however little time is left.
MIN_WORKER_S = 30.0


class Pairs:
    """Numbers of the pairs to run: none is begun that would end beyond the limit if it took as long as the longest.

    Attributes:
        num_complete: Pairs of which every arm was run, as `finish_pair` was told.
    """

    def __init__(self, num_pairs: int, time_limit_s: float) -> None:
        self._num_pairs = num_pairs
        self._time_limit_s = time_limit_s
        self._began = time.monotonic()
        self._state = "in progress"
        self.num_complete = 0

    def __iter__(self) -> Iterator[int]:
        longest = 0.0
        for pair in range(self._num_pairs):
            began = time.monotonic()
            if began - self._began + longest > self._time_limit_s:
                self._state = f"the time limit of {self._time_limit_s} s"
                return
            yield pair
            longest = max(longest, time.monotonic() - began)
        self._state = "ended"

    def finish_pair(self) -> None:
        """Counts the pair that is under way; call it once its last arm was run."""
        self.num_complete += 1

    @property
    def is_complete(self) -> bool:
        """The run has ended, and all pairs were run. What failed in them is said by their results."""
        return self._state == "ended" and self.num_complete == self._num_pairs

    def progress(self) -> dict[str, Any]:
        """What the JSON says of it; `note` is `complete`, or how many pairs there are and why no more."""
        note = "complete" if self.is_complete else f"{self.num_complete} of {self._num_pairs} pairs: {self._state}"
        return {"note": note, "pairs_complete": self.num_complete, "pairs_wanted": self._num_pairs}

    def worker_s(self) -> float:
        """Seconds that a worker which starts now may take."""
        return max(MIN_WORKER_S, self._time_limit_s - (time.monotonic() - self._began))


def run_worker(
    script: Path,
    options: Mapping[str, Any],
    *,
    arm: str,
    out: Path,
    timeout_s: float,
    key: str,
    wanted: Iterable[Any],
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """One process of one arm; what it measured before it ended, in whatever way.

    Args:
        script: The worker; it takes `--arm`, `--out` and `options`.
        options: Names as attributes have them, and values.
        out: The worker's results; made anew.
        key: Of a result, what it is of.
        wanted: The values of `key` that the worker is to measure; a process that failed counts for those it lacks.
        environment: Of the process, instead of this one's.
    """
    out.unlink(missing_ok=True)
    command = [sys.executable, str(script), "--arm", arm, "--out", str(out)]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    ended = ""
    try:
        done = subprocess.run(
            command, env=environment, timeout=timeout_s, check=False, capture_output=True, text=True, errors="replace"
        )
        if done.stderr:
            print(done.stderr[-3000:], file=sys.stderr, flush=True)
        if done.returncode:
            ended = f"the process ended with status {done.returncode}: {done.stderr[-300:]}"
    except subprocess.TimeoutExpired:
        ended = f"the process did not end within {timeout_s:.0f} s"
    results: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    seen = {result[key] for result in results}
    if ended:
        results += [{key: value, "arm": arm, "failed": ended} for value in wanted if value not in seen]
    return results


def flaws(results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The results that do not count."""
    return [result for result in results if "failed" in result or result["problems"]]

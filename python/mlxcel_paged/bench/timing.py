"""Timing of several arms against each other on a machine whose speed drifts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved_medians(
    arms: Mapping[str, Callable[[], None]], *, num_rounds: int, min_round_seconds: float = 0.0
) -> dict[str, float]:
    """Times every arm once a round (A B A B ...) and takes each arm's median.

    Args:
        arms: Name to a call that returns when its work is done.
        num_rounds: Timed rounds, after one untimed round.
        min_round_seconds: An arm is repeated inside a round until this time has passed; its round counts the mean.

    Returns:
        Seconds a call by arm, the median over the rounds.
    """
    for call in arms.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(num_rounds):
        for name, call in arms.items():
            num_calls, start = 0, time.perf_counter()
            while True:
                call()
                num_calls += 1
                elapsed = time.perf_counter() - start
                if elapsed >= min_round_seconds:
                    break
            samples[name].append(elapsed / num_calls)
    return {name: statistics.median(values) for name, values in samples.items()}

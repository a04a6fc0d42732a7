"""From the turns of a workload to results by arm, ratios between arms, and reasons not to believe them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mlxcel_paged.bench.serve.decode_window import decode_window
from mlxcel_paged.bench.serve.metrics import serving_metrics
from mlxcel_paged.bench.serve.scrape import ServerCounts
from mlxcel_paged.bench.serve.turn import Turn
from mlxcel_paged.bench.serve.workload import SyntheticWorkload, Workload

_MAX_LISTED_ERRORS = 3


def summarize(workload: Workload, arm: str, turns: Sequence[Turn], goodput_ms: Mapping[str, float]) -> dict[str, Any]:
    """Sums up an arm's turns of a workload; see `bench_serve`."""
    own = [turn for turn in turns if turn.arm == arm]
    counts = [turn.counts for turn in own if turn.counts is not None]
    launches: Counter[str] = Counter()
    for one in counts:
        launches.update(one.decode_launches)
    records = [record for turn in own for record in turn.records]
    duration_s = sum(turn.duration_s for turn in own)
    return {
        "arm": arm,
        **_shape(workload),
        "on_own_path": all(turn.on_own_path for turn in own),
        "launches": dict(launches),
        "decode_throughput": _median(_decode_throughput(turn, workload) for turn in own),
        **_outside_model(counts),
        **serving_metrics(records, duration_s=duration_s, goodput_ms=goodput_ms),
        "turns": [_turn(turn, workload, goodput_ms) for turn in own],
    }


def arm_ratios(workload: Workload, arms: Sequence[str], turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Compares the last arm with every other one, turn by turn, and takes the median.

    Ratios are those of decode throughput, or of output throughput where not all clients ever decoded together.
    """
    by_arm = {arm: {turn.number: turn for turn in turns if turn.arm == arm} for arm in arms}
    last = arms[-1]
    ratios = []
    for other in arms[:-1]:
        for metric, of in (("decode_throughput", _decode_throughput), ("output_throughput", _output_throughput)):
            pairs = [(of(by_arm[last][n], workload), of(by_arm[other][n], workload)) for n in sorted(by_arm[last])]
            values = [left / right for left, right in pairs if left is not None and right]
            if len(values) == len(pairs):
                ratio = statistics.median(values)
                row = {**_shape(workload), "of": last, "to": other, "metric": metric, "ratio": ratio, "turns": values}
                ratios.append(row)
                break
    return ratios


def problems(
    workload: Workload, arms: Sequence[str], turns: Sequence[Turn], *, check_tokens: bool, allow_failures: bool
) -> list[str]:
    """Says in words what is wrong with the turns of a workload; see `bench_serve`."""
    found = []
    for arm in arms:
        own = [turn for turn in turns if turn.arm == arm]
        strayed = [turn for turn in own if not turn.on_own_path]
        if strayed:
            found.append(
                f"{workload.name}: arm {arm} did not run on its own path: {_launches(strayed[0]) or 'no launch'}"
            )
        errors = [record.error for turn in own for record in turn.records if record.error is not None]
        if errors and not allow_failures:
            listed = "; ".join(sorted(set(errors))[:_MAX_LISTED_ERRORS])
            found.append(f"{workload.name}: {len(errors)} requests of arm {arm} failed: {listed}")
    return found + (_differences(workload, arms, turns) if check_tokens else [])


def notes(workload: Workload, arms: Sequence[str], turns: Sequence[Turn]) -> list[str]:
    """Says in words what was not measured, and what to do about it."""
    if workload.clients is None or workload.num_requests < workload.clients:
        return []
    found = []
    for arm in arms:
        own = [turn for turn in turns if turn.arm == arm]
        num_without = sum(_decode_throughput(turn, workload) is None for turn in own)
        if num_without:
            found.append(
                f"{workload.name}: in {num_without} of {len(own)} turns of arm {arm} not all clients decoded at one "
                "time (hint: a larger --output-len, or prompts that finish sooner: -- --max-num-batched-tokens N)"
            )
    return found


def _differences(workload: Workload, arms: Sequence[str], turns: Sequence[Turn]) -> list[str]:
    answers = {
        (turn.arm, turn.number, index): record.text
        for turn in turns
        for index, record in enumerate(turn.records)
        if record.is_complete
    }
    first = arms[0]
    found = []
    for arm in arms[1:]:
        shared = [key for key in answers if key[0] == arm and (first, *key[1:]) in answers]
        differing = [key for key in shared if answers[key] != answers[(first, *key[1:])]]
        if differing:
            _, number, index = differing[0]
            found.append(
                f"{workload.name}: {len(differing)} of {len(shared)} answers of arm {arm} differ from arm {first}, "
                f"the first in request {index} of turn {number}"
            )
    return found


def _turn(turn: Turn, workload: Workload, goodput_ms: Mapping[str, float]) -> dict[str, Any]:
    window = None if workload.clients is None else decode_window(turn.records, workload.clients)
    return {
        "number": turn.number,
        "on_own_path": turn.on_own_path,
        "launches": _launches(turn),
        "decode_throughput": None if window is None else window.tokens_per_s,
        "decode_window_s": None if window is None else window.seconds,
        **_outside_model([] if turn.counts is None else [turn.counts]),
        **serving_metrics(turn.records, duration_s=turn.duration_s, goodput_ms=goodput_ms),
    }


def _launches(turn: Turn) -> dict[str, int] | None:
    return None if turn.counts is None else dict(turn.counts.decode_launches)


def _outside_model(counts: Sequence[ServerCounts]) -> dict[str, float | None]:
    """What a step costs beside the model and the sampler: scheduling, page tables, delivery."""
    step_s, num_steps = sum(one.step_s for one in counts), sum(one.num_steps for one in counts)
    outside_s = step_s - sum(one.model_s for one in counts)
    return {
        "outside_model_percent": 100 * outside_s / step_s if step_s else None,
        "outside_model_ms_per_step": 1e3 * outside_s / num_steps if step_s and num_steps else None,
    }


def _shape(workload: Workload) -> dict[str, Any]:
    shape: dict[str, Any] = {"workload": workload.name, "max_concurrency": workload.clients}
    if isinstance(workload, SyntheticWorkload):
        shape |= {"context": workload.context, "output_len": workload.output_len}
    return shape


def _decode_throughput(turn: Turn, workload: Workload) -> float | None:
    window = None if workload.clients is None else decode_window(turn.records, workload.clients)
    return None if window is None else window.tokens_per_s


def _output_throughput(turn: Turn, _workload: Workload) -> float | None:
    return sum(record.num_output_tokens for record in turn.records if record.is_complete) / turn.duration_s


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None

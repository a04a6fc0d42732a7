"""Medians, ratios and verdicts of the whole-step benchmark, as JSON and as a Markdown table."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Iterable
from typing import Any

from step_cells import CELLS, FUSION_TARGETS, GATHER_TARGETS, STEP_TARGETS, STEP_TARGETS_4BIT

Result = dict[str, Any]
# Key, arm above, arm below, number.
_RATIOS = (
    ("step_ratio", "mlx-lm", "fused", "step_ms"),
    ("gather_ratio", "gather", "fused", "step_ms"),
    ("fusion_ratio", "fused", "fused-plain", "step_ms"),
    ("read_ratio", "fused", "fused-tolist", "step_ms"),
    ("memory_ratio", "fused", "mlx-lm", "peak_gb"),
)
_MEDIANS = ("step_ms", "host_ms", "device_ms", "peak_gb", "active_gb", "setup_peak_gb")


def summarize(results: Iterable[Result], bits: int, *, with_targets: bool) -> list[dict[str, Any]]:
    """One row a cell.

    Args:
        results: What the workers measured, each with its `pair`: processes of different arms that ran next to each
            other.
        bits: Of the weights; 0 for f16.
        with_targets: The shapes are those that the targets are meant for.
    """
    results = list(results)
    names = [name for name in CELLS if any(result["cell"] == name for result in results)]
    rows = [_cell([result for result in results if result["cell"] == name], name) for name in names]
    for row in rows:
        row["targets"] = _verdicts(row, bits) if with_targets else {}
    return rows


def _cell(results: list[Result], name: str) -> dict[str, Any]:
    good = [result for result in results if "failed" not in result and not result["problems"]]
    arms: dict[str, dict[str, Any]] = {}
    for arm in dict.fromkeys(result["arm"] for result in results):
        mine = [result for result in good if result["arm"] == arm]
        bad = [result for result in results if result["arm"] == arm and result not in mine]
        arms[arm] = {"processes": len(mine)} | {
            key: round(statistics.median(values), 3)
            for key in _MEDIANS
            if (values := [result[key] for result in mine if result[key] is not None])
        }
        if bad:
            arms[arm]["rejected"] = [result.get("failed") or result["problems"] for result in bad]
    row: dict[str, Any] = {"cell": name, "arms": arms}
    row["ratio_spreads"] = {}
    for key, over, under, number in _RATIOS:
        ratios = _ratios(good, over, under, number)
        row[key] = round(statistics.median(ratios), 3) if ratios else None
        if ratios:
            row["ratio_spreads"][key] = {
                "pairs": len(ratios),
                "min": round(min(ratios), 3),
                "max": round(max(ratios), 3),
            }
    return row


def _verdicts(row: dict[str, Any], bits: int) -> dict[str, dict[str, Any]]:
    name = row["cell"]
    step_targets = STEP_TARGETS_4BIT if bits == 4 else STEP_TARGETS
    targets = (
        ("step_ratio", step_targets.get(name), operator.ge),
        ("gather_ratio", None if bits else GATHER_TARGETS.get(name), operator.ge),
        ("fusion_ratio", None if bits else FUSION_TARGETS.get(name), operator.le),
    )
    return {
        key: {"wanted": wanted, "met": None if row[key] is None else is_met(row[key], wanted)}
        for key, wanted, is_met in targets
        if wanted is not None
    }


def _ratios(results: list[Result], over: str, under: str, key: str) -> list[float]:
    """One arm's number over the other's, pair by pair."""
    by_pair: dict[Any, dict[str, float]] = {}
    for result in results:
        by_pair.setdefault(result["pair"], {})[result["arm"]] = result[key]
    return [pair[over] / pair[under] for pair in by_pair.values() if over in pair and under in pair]


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of `summarize`, times in ms, memory in GB; ratios as median, smallest and largest of the pairs."""
    arms = list(dict.fromkeys(arm for row in rows for arm in row["arms"]))
    head = ["cell", *(f"{arm}: step / host / device" for arm in arms), *(f"{arm}: peak GB" for arm in arms)]
    head += [
        "mlx-lm / fused",
        "gather / fused",
        "fused / fused-plain",
        "fused / fused-tolist",
        "peak: fused / mlx-lm",
        "processes",
    ]
    lines = [" | ".join(["", *head, ""]).strip(), "|" + "---|" * len(head)]
    for row in rows:
        cells = [row["cell"]]
        for arm in arms:
            numbers = row["arms"].get(arm, {})
            cells.append(" / ".join(_number(numbers.get(key)) for key in ("step_ms", "host_ms", "device_ms")))
        cells += [_number(row["arms"].get(arm, {}).get("peak_gb")) for arm in arms]
        cells += [_ratio_text(row, key) for key, *_ in _RATIOS]
        cells.append(str(min((numbers["processes"] for numbers in row["arms"].values()), default=0)))
        lines.append("| " + " | ".join(cells) + " |")
    for row in rows:
        for arm, numbers in row["arms"].items():
            for reason in numbers.get("rejected", []):
                lines.append(f"\nRejected: {row['cell']} {arm}: {reason}")
    return "\n".join(lines)


def _ratio_text(row: dict[str, Any], key: str) -> str:
    spread = row["ratio_spreads"].get(key)
    if spread is None:
        return "-"
    text = f"{row[key]:.2f}, {spread['min']:.2f} to {spread['max']:.2f} in {spread['pairs']}"
    target = row["targets"].get(key)
    if target:
        sign = "<=" if key == "fusion_ratio" else ">="
        text += f" ({'met' if target['met'] else '**missed**'}, {sign} {target['wanted']})"
    return text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

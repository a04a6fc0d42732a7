"""Draws the results of `bench_serve` as PNG files. Needs matplotlib, which the extra `bench` installs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Distinct for readers who do not tell red from green (Okabe and Ito's palette).
_COLOURS = {"dense": "#E69F00", "gather": "#56B4E9", "fused": "#009E73", "server": "#0072B2"}
_DPI = 144
_Panels = list[tuple[str, str, str | None]]  # title, key of the bar, key of the line above it


def write_plots(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws `throughput.png` and `latency.png`; returns what was drawn, nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    results = document["results"]
    names = list(dict.fromkeys(result["workload"] for result in results))
    arms = list(dict.fromkeys(result["arm"] for result in results))
    by_key = {(result["arm"], result["workload"]): result for result in results}
    throughput: _Panels = [
        ("decode throughput, tokens/s", "decode_throughput", None),
        ("output throughput, tokens/s", "output_throughput", None),
    ]
    latency: _Panels = [
        ("TTFT, ms: median, line to p99", "median_ttft_ms", "p99_ttft_ms"),
        ("TPOT, ms: median, line to p99", "median_tpot_ms", "p99_tpot_ms"),
        ("ITL, ms: median, line to p99", "median_itl_ms", "p99_itl_ms"),
        ("E2E latency, ms: median, line to p99", "median_e2el_ms", "p99_e2el_ms"),
    ]
    title = f"{document['model']}, {document['environment']['date']}"
    paths = []
    for stem, panels in (("throughput", throughput), ("latency", latency)):
        path = folder / f"{stem}.png"
        _draw(path, title, panels, names, arms, by_key)
        paths.append(path)
    return paths


def _draw(
    path: Path,
    title: str,
    panels: _Panels,
    names: list[str],
    arms: list[str],
    by_key: Mapping[tuple[str, str], Mapping[str, Any]],
) -> None:
    """One panel a quantity, workloads side by side, arms within: bars from zero, or medians with a line up to the p99.

    Medians and p99 may lie far apart, so those axes are logarithmic, and on such an axis a bar's length says nothing.
    """
    from matplotlib.figure import Figure

    num_rows = -(-len(panels) // 2)
    figure = Figure(figsize=(10, 0.6 + 3.4 * num_rows), layout="constrained")
    figure.suptitle(title, fontsize=11)
    width = 0.8 / len(arms)
    for place, (label, key, p99_key) in enumerate(panels, start=1):
        axes = figure.add_subplot(num_rows, 2, place)
        for number, arm in enumerate(arms):
            results = [by_key[arm, name] for name in names]
            places = [index + (number - (len(arms) - 1) / 2) * width for index in range(len(names))]
            if p99_key is None:
                values = [result[key] or 0.0 for result in results]
                bars = axes.bar(places, values, width * 0.92, label=arm, color=_COLOURS[arm])
                axes.bar_label(bars, [f"{value:.3g}" if value else "" for value in values], fontsize=7, padding=1)
                continue
            points = [
                (x, result[key], result[p99_key]) for x, result in zip(places, results, strict=True) if result[key]
            ]
            axes.vlines(
                [x for x, _, _ in points], [y for _, y, _ in points], [top for _, _, top in points], _COLOURS[arm]
            )
            axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], 36, _COLOURS[arm], label=arm)
        has_points = any(by_key[arm, name][key] for arm in arms for name in names)
        _style(axes, label, names, is_log=p99_key is not None and has_points)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(arms), frameon=False, fontsize=9)
    figure.savefig(path, dpi=_DPI)


def _style(axes: Any, label: str, names: list[str], *, is_log: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_title(label, fontsize=10)
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=0 if len(names) < 5 else 30)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(y=0.12)
    if is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)

"""Writes a document of `bench_serve` for people: rows of a table, Markdown, and a folder with all of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxcel_paged.bench.serve.plots import write_plots

_LATENCIES = ("ttft", "tpot", "itl", "e2el")


def rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results, one row each, in the columns that fit a terminal; times are milliseconds."""
    return [
        {
            "workload": result["workload"],
            "arm": result["arm"],
            "decode tok/s": _or_dash(result["decode_throughput"]),
            "output tok/s": result["output_throughput"],
            "TTFT median": _or_dash(result["median_ttft_ms"]),
            "TPOT median": _or_dash(result["median_tpot_ms"]),
            "ITL p99": _or_dash(result["p99_itl_ms"]),
            "E2EL median": _or_dash(result["median_e2el_ms"]),
            "outside model": _outside_model(result),
            "done": f"{result['completed']}/{result['completed'] + result['failed']}",
            "path": _path(result),
        }
        for result in document["results"]
    ]


def ratio_lines(document: Mapping[str, Any]) -> list[str]:
    """The ratios between arms, one line each."""
    return [
        f"{ratio['workload']}: {ratio['of']} / {ratio['to']} = {ratio['ratio']:.2f} in "
        f"{ratio['metric'].replace('_', ' ')} "
        f"(turns: {', '.join(f'{turn:.2f}' for turn in ratio['turns'])})"
        for ratio in document["ratios"]
    ]


def markdown(document: Mapping[str, Any]) -> str:
    """The document as Markdown, for a file or an issue."""
    environment = document["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    machine = f"{environment['processor']}, {environment['num_cores']} cores, {environment['simd']}"
    lines = [
        f"# bench serve: {document['model']}",
        "",
        f"{environment['date']}; {environment['system']}, {machine}; {versions}.",
        "",
    ]
    if "command" in document:
        lines += [f"    {document['command']}", ""]
    lines += [
        "A workload is clients x prompt tokens + output tokens, or a trace. Decode throughput is measured while all "
        "clients decode (the median turn). Milliseconds: mean / median / std / p99 over all turns. Outside model: the "
        "server's share of a step that is neither model nor sampler.",
        "",
        "| workload | arm | decode tok/s | output tok/s | TTFT | TPOT | ITL | E2EL | outside model | done | path |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, result in zip(rows(document), document["results"], strict=True):
        cells = [row["workload"], row["arm"], row["decode tok/s"], row["output tok/s"]]
        cells += [_latency(result, name) for name in _LATENCIES]
        cells += [row["outside model"], row["done"], row["path"]]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    sections = (("Ratios", ratio_lines(document)), ("Notes", document["notes"]), ("Problems", document["problems"]))
    for title, texts in sections:
        if texts:
            lines += ["", f"## {title}", "", *(f"* {text}" for text in texts)]
    return "\n".join(lines) + "\n"


def write_report(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes `serve.json`, `serve.md` and, where matplotlib is installed, plots into a folder, which is made.

    Returns:
        What was written.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots = write_plots(document, folder)
    text = markdown(document) + "".join(f"\n![{path.stem}]({path.name})\n" for path in plots)
    json_path, markdown_path = folder / "serve.json", folder / "serve.md"
    json_path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    markdown_path.write_text(text, encoding="utf-8")
    return [json_path, markdown_path, *plots]


def _path(result: Mapping[str, Any]) -> str:
    if result["launches"]:
        return ", ".join(f"{outcome} {count}" for outcome, count in result["launches"].items())
    return "no pages" if result["arm"] == "dense" and result["on_own_path"] else "-"


def _outside_model(result: Mapping[str, Any]) -> str:
    if result["outside_model_percent"] is None:
        return "-"
    return f"{result['outside_model_percent']:.1f} %, {result['outside_model_ms_per_step']:.2f} ms"


def _latency(result: Mapping[str, Any], name: str) -> str:
    values = [result[f"{statistic}_{name}_ms"] for statistic in ("mean", "median", "std", "p99")]
    return "-" if None in values else " / ".join(_cell(value) for value in values)


def _cell(value: Any) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def _or_dash(value: float | None) -> float | str:
    return "-" if value is None else value

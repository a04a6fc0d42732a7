"""Time to the first token of Llama-3.1-8B shapes under MLX on a GPU: ours on pages, and mlx-lm.

    python benchmarks/bench_prefill_cuda.py --out prefill.json            # 2K and 16K prompts, 5 pairs of processes
    python benchmarks/bench_prefill_cuda.py --arms ours,batch_generator   # against mlx-lm's continuous batching
    python benchmarks/bench_prefill_cuda.py --chunk 512                   # ours in smaller chunks

Random f16 weights, one prompt of random tokens at a time, greedy, default settings. Each arm runs in a process of its
own; processes take turns, and a pair is one process of each arm. From the prompt's ids to the first output token in
Python: the median of a process's runs after an untimed one, then over processes; ratios within a pair, then their
median. Peak memory is MLX's (`mx.get_peak_memory()`), weights and our pools included.

Our scores of the first token are compared with mlx-lm's in the same run: root mean square difference over standard
deviation. Another prompt, position or page gives about 1.4; rounding in f16 stays below the bound.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_step_mlx import device_name, packages
from step_cells import SHAPES, TARGET_SHAPE

HERE = Path(__file__).parent
ARMS = ("ours", "generate_step", "batch_generator")
MAX_RATIO = 1.05  # ours over mlx-lm's
MAX_DIFFERENCE = 0.1


def run_worker(options: argparse.Namespace, arm: str, folder: Path, timeout: float) -> list[dict[str, Any]]:
    """One process of one arm; what it measured before it ended, in whatever way."""
    out = folder / f"{arm}.jsonl"
    out.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "prefill_worker.py"), "--arm", arm, "--out", str(out)]
    for name in ("tokens", "shape", "device", "page_size", "chunk", "runs"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    ended = ""
    try:
        done = subprocess.run(command, timeout=timeout, check=False, capture_output=True, text=True)
        if done.stderr:
            print(done.stderr[-3000:], file=sys.stderr, flush=True)
        if done.returncode:
            ended = f"the process ended with status {done.returncode}: {done.stderr[-300:]}"
    except subprocess.TimeoutExpired:
        ended = f"the process did not end within {timeout:.0f} s"
    results = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    seen = {result["tokens"] for result in results}
    if ended:
        wanted = map(int, options.tokens.split(","))
        results += [{"tokens": count, "arm": arm, "failed": ended} for count in wanted if count not in seen]
    return results


def compare_scores(folder: Path, arms: list[str], results: list[dict[str, Any]]) -> None:
    """Adds to our results of this pair how far their scores are from mlx-lm's."""
    for result in results:
        theirs = [folder / f"{arm}.{result['tokens']}.npy" for arm in arms if arm != "ours"]
        mine = folder / f"ours.{result['tokens']}.npy"
        if result["arm"] != "ours" or "failed" in result or not (theirs and theirs[0].exists() and mine.exists()):
            continue
        a, b = (np.load(path).astype(np.float64) for path in (mine, theirs[0]))
        a, b = a - a.mean(), b - b.mean()
        result["difference"] = round(float(np.sqrt(np.mean((a - b) ** 2)) / b.std()), 5)
        if not result["difference"] <= MAX_DIFFERENCE:
            result["problems"].append(f"scores differ by {result['difference']}, at most {MAX_DIFFERENCE}")


def summarize(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a prompt length and arm."""
    rows = []
    good = [result for result in results if "failed" not in result]
    for tokens in sorted({result["tokens"] for result in good}):
        times = {(result["pair"], result["arm"]): result["ttft_ms"] for result in good if result["tokens"] == tokens}
        for arm in dict.fromkeys(arm for _, arm in times):
            mine = [result for result in good if (result["tokens"], result["arm"]) == (tokens, arm)]
            ratios = [
                time / times[pair, arm]
                for (pair, other), time in times.items()
                if other == "ours" and (pair, arm) in times
            ]
            ratio = round(statistics.median(ratios), 3) if ratios and arm != "ours" else None
            rows.append(
                {
                    "tokens": tokens,
                    "arm": arm,
                    "num_processes": len(mine),
                    "ttft_ms": round(statistics.median(result["ttft_ms"] for result in mine), 2),
                    "fastest_ms": min(min(result["runs_ms"]) for result in mine),
                    "cold_ms": round(statistics.median(result["cold_ms"] for result in mine), 2),
                    "peak_gb": round(statistics.median(result["peak_gb"] for result in mine), 3),
                    "peak_over_weights_gb": round(
                        statistics.median(result["peak_gb"] - result["weights_gb"] for result in mine), 3
                    ),
                    "ours_over_this": ratio,
                    "within_target": None if ratio is None else ratio <= MAX_RATIO,
                }
            )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| prompt | arm | processes | first token, ms | cold, ms | peak, GB | beyond weights, GB | ours / this |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "-" if row["ours_over_this"] is None else f"{row['ours_over_this']:.3f}"
        lines.append(
            f"| {row['tokens']} | {row['arm']} | {row['num_processes']} | {row['ttft_ms']} | {row['cold_ms']} |"
            f" {row['peak_gb']} | {row['peak_over_weights_gb']} | {ratio} |"
        )
    return "\n".join(lines)


def write(options: argparse.Namespace, results: list[dict[str, Any]], note: str) -> dict[str, Any]:
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "device": device_name(),
        "num_cores": os.cpu_count(),
        "versions": packages(),
        "shape": options.shape,
        "page_size": options.page_size,
        "chunk": options.chunk,
        "runs": options.runs,
        "note": note,
        "rows": summarize(results),
        "results": results,
    }
    options.out.write_text(json.dumps(document, indent=1))
    return document


def measure(options: argparse.Namespace) -> dict[str, Any]:
    arms = options.arms.split(",")
    began, longest = time.monotonic(), 0.0
    results: list[dict[str, Any]] = []
    note = "complete"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for pair in range(options.pairs):
            pair_began = time.monotonic()
            if pair_began - began + longest > options.time_limit_s:
                note = f"{pair} of {options.pairs} pairs: the time limit of {options.time_limit_s} s"
                break
            measured = []
            for arm in arms if pair % 2 == 0 else arms[::-1]:
                left = options.time_limit_s - (time.monotonic() - began)
                measured += run_worker(options, arm, folder, max(30.0, left))
                shown = [f"{result['tokens']}: {result.get('ttft_ms', 'failed')} ms" for result in measured[-2:]]
                print(f"pair {pair + 1} {arm:16}" + "  ".join(shown), flush=True)
            compare_scores(folder, arms, measured)
            results += [result | {"pair": pair} for result in measured]
            write(options, results, note)
            longest = max(longest, time.monotonic() - pair_began)
    return write(options, results, note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("prefill.json"))
    parser.add_argument("--tokens", default="2048,16384", help="lengths of the prompts")
    parser.add_argument("--arms", default="ours,generate_step", help=f"out of {', '.join(ARMS)}")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3, help="timed runs of a process and prompt, after one untimed")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of our chunks; mlx-lm's default is 2048")
    parser.add_argument("--page-size", type=int, default=32, help="the engine's default")
    parser.add_argument("--shape", default=TARGET_SHAPE, choices=SHAPES)
    parser.add_argument("--device", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--time-limit-s", type=float, default=170, help="no further pair is begun beyond it")
    options = parser.parse_args()
    unknown = set(options.arms.split(",")) - set(ARMS)
    if unknown:
        parser.error(f"--arms: unknown {', '.join(sorted(unknown))}; known: {', '.join(ARMS)}")
    if not all(count.isdigit() and int(count) >= 2 for count in options.tokens.split(",")):
        parser.error("--tokens must be numbers of at least 2, with commas between them")
    if min(options.pairs, options.runs, options.chunk) < 1:
        parser.error("--pairs, --runs and --chunk must be at least 1")
    document = measure(options)
    print(markdown(document["rows"]))
    failed = [result for result in document["results"] if "failed" in result or result["problems"]]
    for result in failed:
        print(f"{result['arm']} {result['tokens']}: {result.get('failed') or result['problems']}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

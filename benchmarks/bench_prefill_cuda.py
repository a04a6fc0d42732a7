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
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gpu_needs import require_mlx_gpu
from pairs import Pairs, flaws, run_worker
from run_record import write_run
from step_cells import SHAPES, TARGET_SHAPE

HERE = Path(__file__).parent
ARMS = ("ours", "generate_step", "batch_generator")
MAX_RATIO = 1.05  # ours over mlx-lm's
MAX_DIFFERENCE = 0.1


def run_arm(options: argparse.Namespace, arm: str, folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    return run_worker(
        HERE / "prefill_worker.py",
        {name: getattr(options, name) for name in ("tokens", "shape", "device", "page_size", "chunk", "runs")},
        arm=arm,
        out=folder / f"{arm}.jsonl",
        timeout_s=timeout_s,
        key="tokens",
        wanted=map(int, options.tokens.split(",")),
    )


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


def write(options: argparse.Namespace, results: list[dict[str, Any]], pairs: Pairs) -> dict[str, Any]:
    document = {
        "shape": options.shape,
        "page_size": options.page_size,
        "chunk": options.chunk,
        "runs": options.runs,
        **pairs.progress(),
        "rows": summarize(results),
        "results": results,
    }
    return write_run(options.out, document, complete=pairs.is_complete)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    arms = options.arms.split(",")
    pairs = Pairs(options.pairs, options.time_limit_s)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for pair in pairs:
            measured = []
            for arm in arms if pair % 2 == 0 else arms[::-1]:
                measured += run_arm(options, arm, folder, pairs.worker_s())
                shown = [f"{result['tokens']}: {result.get('ttft_ms', 'failed')} ms" for result in measured[-2:]]
                print(f"pair {pair + 1} {arm:16}" + "  ".join(shown), flush=True)
            compare_scores(folder, arms, measured)
            results += [result | {"pair": pair} for result in measured]
            pairs.finish_pair()
            write(options, results, pairs)
    return write(options, results, pairs)


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
    if options.device == "gpu":
        require_mlx_gpu(without="--device cpu --shape tiny --tokens 256,1024")
    document = measure(options)
    print(markdown(document["rows"]))
    failed = flaws(document["results"])
    for result in failed:
        print(f"{result['arm']} {result['tokens']}: {result.get('failed') or result['problems']}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Whole decode steps of Llama-3.1-8B shapes under MLX: mlx-lm's BatchGenerator, our fused arm, our gather arm.

    python benchmarks/bench_step_mlx.py --out step.json                       # mlx-lm and fused, every cell, 5 pairs
    python benchmarks/bench_step_mlx.py --out g.json --arms fused,gather --cells 4x4K,4x16K --pairs 5
    python benchmarks/bench_step_mlx.py --out q.json --bits 4 --cells 16x4K
    python benchmarks/bench_step_mlx.py --out s.json --arms fused,fused-plain --cells 4x4K,16x4K
    python benchmarks/bench_step_mlx.py --report step.json other.json         # one table out of several runs

Random f16 weights, synthetic contexts, greedy, MLX's and mlx-lm's default settings. Each arm runs in a process of its
own; processes take turns (A B A B ...), and a pair is one process of each arm. What is measured, over the timed steps
of a process, then the median over processes; ratios are taken within a pair, then their median:

- step: wall time of all timed steps over their number, one step ahead (`async_eval` of the next step, then the last
  one's tokens are read), in both. The median of single steps is in the JSON too; it leaves out those in which a host
  that ran ahead waits for the device, every second one with mlx-lm's dense caches.
- host: from the start of a step until its `async_eval` returns.
- device: events around every graph launch of eight further steps, summed. A graph that starts on an idle stream counts
  from the launch call on.
- peak: `mx.get_peak_memory()` over the timed steps, weights included; the JSON's `setup_peak_gb` covers admission.
  What prompts take is measured by bench_memory_cuda.py.

Arms that end in `-plain` run without our kernels outside attention; `--step-fusion` says what the others do.
`fused-tolist` reads a step's tokens out of their array instead of through page-locked memory.

With `--trace on` the JSON also has the kernels of eight further steps and their time, from CUPTI. Use it for a run
whose times do not count.

A cell is rejected if an attention launch took another path, if sequences are not as long as they must be, or if logits
are not finite.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import graph_counter
from gpu_needs import require_mlx_gpu
from pairs import Pairs, flaws, run_worker
from run_record import write_run
from step_cells import ARMS, CELLS, SHAPES, TARGET_SHAPE, arm_environment
from step_report import markdown, summarize

HERE = Path(__file__).parent


def preload_environment(folder: Path, wanted: bool) -> tuple[dict[str, str], str]:
    """The workers' environment with the graph counter, if it can be built and MLX runs under it; and a remark."""
    if not wanted:
        return dict(os.environ), "off"
    try:
        environment = graph_counter.preload(graph_counter.build(folder))
        probe = "import mlx.core as mx; mx.eval(mx.ones((4,)) + 1)"
        subprocess.run([sys.executable, "-c", probe], env=environment, check=True, timeout=120, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        return dict(os.environ), f"unavailable: {error}"
    return environment, "on"


def run_arm(
    options: argparse.Namespace, arm: str, environment: dict[str, str], folder: Path, timeout_s: float
) -> list[dict[str, Any]]:
    names = ("cells", "shape", "device", "bits", "page_size", "warm_up", "steps", "trace")
    return run_worker(
        HERE / "step_worker.py",
        {name: getattr(options, name) for name in names},
        arm=arm,
        out=folder / "result.jsonl",
        timeout_s=timeout_s,
        key="cell",
        wanted=options.cells.split(","),
        environment=environment | arm_environment(arm, options.step_fusion),
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    pairs = Pairs(options.pairs, options.time_limit_s)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment, counter = preload_environment(folder, options.counter == "on")
        for pair in pairs:
            for arm in options.arms.split(","):
                measured = run_arm(options, arm, environment, folder, pairs.worker_s())
                results += [result | {"pair": f"{options.out.stem}:{pair}"} for result in measured]
                write(options, results, counter, pairs)
                print(progress_line(pair, arm, measured), flush=True)
            pairs.finish_pair()
            write(options, results, counter, pairs)
    return write(options, results, counter, pairs)


def progress_line(pair: int, arm: str, results: list[dict[str, Any]]) -> str:
    times = [f"{result['cell']} {result.get('step_ms', 'failed')}" for result in results]
    return f"pair {pair + 1} {arm:12}" + "  ".join(times)


def write(options: argparse.Namespace, results: list[dict[str, Any]], counter: str, pairs: Pairs) -> dict[str, Any]:
    document = {
        "shape": options.shape,
        "bits": options.bits,
        "page_size": options.page_size,
        "step_fusion": options.step_fusion,
        "warm_up": options.warm_up,
        "steps": options.steps,
        "graph_counter": counter,
        "trace": options.trace,
        **pairs.progress(),
        "rows": summarize(results, options.bits, with_targets=options.shape == TARGET_SHAPE),
        "results": results,
    }
    return write_run(options.out, document, complete=pairs.is_complete)


def report(paths: list[Path]) -> int:
    """Prints one table a kind of weights, over all runs given, and which of them are not complete."""
    documents = [json.loads(path.read_text()) for path in paths]
    for path, document in zip(paths, documents, strict=True):
        if document["note"] != "complete":
            print(f"{path.name}: {document['note']}")
    for bits in sorted({document["bits"] for document in documents}):
        results = [result for document in documents if document["bits"] == bits for result in document["results"]]
        print(
            f"\n{f'{bits}-bit' if bits else 'f16'} weights\n\n{markdown(summarize(results, bits, with_targets=True))}"
        )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("step.json"))
    parser.add_argument("--report", type=Path, nargs="+", help="print the tables of finished runs and end")
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--arms", default="mlx-lm,fused", help=f"in turn-taking order, out of {', '.join(ARMS)}")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--bits", type=int, default=0, choices=(0, 4, 8))
    parser.add_argument(
        "--step-fusion", default="default", choices=("default", "on", "off"), help="our kernels outside attention"
    )
    parser.add_argument("--page-size", type=int, default=32, help="the engine's default")
    parser.add_argument("--shape", default=TARGET_SHAPE, choices=SHAPES)
    parser.add_argument("--device", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--counter", default="on", choices=("on", "off"), help="preload the graph counter")
    parser.add_argument("--trace", default="off", choices=("on", "off"), help="CUPTI's kernels of a step; slows steps")
    parser.add_argument("--time-limit-s", type=float, default=540, help="no further pair is begun beyond it")
    options = parser.parse_args()
    if options.report:
        return report(options.report)
    for name, known in (("cells", CELLS), ("arms", ARMS)):
        unknown = set(getattr(options, name).split(",")) - set(known)
        if unknown:
            parser.error(f"--{name}: unknown {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    if options.pairs < 1:
        parser.error("--pairs must be at least 1")
    if options.device == "gpu":
        require_mlx_gpu()
    document = measure(options)
    print(markdown(document["rows"]))
    return 1 if flaws(document["results"]) else 0


if __name__ == "__main__":
    sys.exit(main())

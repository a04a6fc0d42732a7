"""Peak memory of four long prompts and their answers under MLX on a GPU: ours on pages, and mlx-lm.

    python benchmarks/bench_memory_cuda.py --out memory.json      # 4 prompts of 16,384 tokens, 32 tokens each
    python benchmarks/bench_memory_cuda.py --chunk 2048           # ours in chunks as large as mlx-lm's

Llama-3.1-8B shapes, random f16 weights, prompts of random tokens, greedy. Each arm runs in a process of its own:

- ours: the engine's scheduler, runner and step loop with the engine's defaults. The budget is its automatic one, so the
  pools hold what the sequences need and no more.
- mlx-lm: `BatchGenerator` with its defaults; all prompts are inserted at once, as its server does with requests that
  wait.

The peak is `mx.get_peak_memory()` from the loaded weights to the last token, pools, workspace and the engine's
self-check included; MLX's cache of freed buffers does not count in either arm and is given apart. It is also split into
the time until every sequence has its first token, and the rest.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_needs import require_mlx_gpu
from pairs import flaws
from run_record import write_run
from step_cells import MEMORY_TARGETS, SHAPES, TARGET_SHAPE

ARMS = ("mlx-lm", "ours")
MAX_RATIO = MEMORY_TARGETS["4x16K"]


class PeakLog:
    """Peaks of a run in two phases, and the tokens that came out."""

    def __init__(self, mx: Any, num_sequences: int) -> None:
        self._mx = mx
        self._waiting = num_sequences
        self._began = time.perf_counter()
        self.tokens: dict[Any, list[int]] = {}
        self.prompt_peak = 0
        self.prompt_s = 0.0

    def add(self, sequence: Any, token: int) -> None:
        if sequence not in self.tokens:
            self.tokens[sequence] = []
            self._waiting -= 1
            if not self._waiting:
                self.prompt_peak = self._mx.get_peak_memory()
                self.prompt_s = time.perf_counter() - self._began
                self._mx.reset_peak_memory()
        self.tokens[sequence].append(token)

    def result(self, weights: int) -> dict[str, Any]:
        self._mx.synchronize()
        decode_peak = self._mx.get_peak_memory()
        peak = max(self.prompt_peak, decode_peak)
        return {
            "weights_gb": round(weights / 1e9, 3),
            "peak_gb": round(peak / 1e9, 3),
            "beyond_weights_gb": round((peak - weights) / 1e9, 3),
            "prompts_peak_gb": round(self.prompt_peak / 1e9, 3),
            "decode_peak_gb": round(decode_peak / 1e9, 3),
            "cache_at_end_gb": round(self._mx.get_cache_memory() / 1e9, 3),
            "prompts_s": round(self.prompt_s, 2),
            "total_s": round(time.perf_counter() - self._began, 2),
            "num_tokens": sorted(len(tokens) for tokens in self.tokens.values()),
            "first_tokens": [tokens[0] for _, tokens in sorted(self.tokens.items())],
        }


def run_mlx_lm(options: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator
    from step_arms import build_model

    mx.set_default_device(mx.cpu if options.device == "cpu" else mx.gpu)
    dtype = mx.float32 if options.device == "cpu" else mx.float16
    model = build_model(SHAPES[options.shape], bits=0, dtype=dtype)
    weights = mx.get_active_memory()
    mx.reset_peak_memory()
    log = PeakLog(mx, len(prompts))
    generator = BatchGenerator(model, max_tokens=options.output_tokens)
    generator.insert(prompts)
    num_left = len(prompts)
    while num_left:
        _, responses = generator.next()
        for response in responses:
            log.add(response.uid, int(response.token))
            num_left -= response.finish_reason is not None
    result = log.result(weights)
    generator.close()
    return result | {"problems": ["not mlx-lm alone"] if "mlxcel_paged" in sys.modules else []}


def run_ours(options: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    from mlxcel_paged import blas

    blas.prepare()
    import mlx.core as mx
    from traffic import core_over, load_random

    from mlxcel_paged.engine.step_loop import StepLoop
    from mlxcel_paged.engine.step_times import StepTimes
    from mlxcel_paged.request import FinishReason, Request, SamplingParams, TokenEvent

    max_context = options.prompt_tokens + options.output_tokens
    loaded = load_random(SHAPES[options.shape], device=options.device, bits=0, max_context=max_context)
    weights = mx.get_active_memory()
    mx.reset_peak_memory()
    core = core_over(
        loaded, batch=len(prompts), page_size=options.page_size, budget_bytes=None, prefill_chunk=options.chunk
    )
    log = PeakLog(mx, len(prompts))
    problems: list[str] = []

    def take(events: list[TokenEvent]) -> None:
        for event in events:
            if event.token_id is not None:
                log.add(event.request_id, event.token_id)
            if event.finish_reason not in (None, FinishReason.LENGTH):
                problems.append(f"{event.request_id} ended by {event.finish_reason}: {event.error}")
        released = core.scheduler.take_released()
        if released:
            core.runner.release(released)

    sampling = SamplingParams(max_tokens=options.output_tokens, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.scheduler.add(Request(f"r{index}", prompt, sampling))
    loop = StepLoop(core, take, StepTimes())
    while core.scheduler.has_work:
        loop.turn()
    result = log.result(weights)
    memory = core.model.memory
    decode, prefill = core.runner.outcomes(), core.runner.prefill_outcomes()
    if set(decode) != {"fused"}:
        problems.append(f"decode took other paths: {decode}")
    if options.device == "gpu" and not set(prefill) <= {"chunk_sdpa", "write_only"}:
        problems.append(f"prefill took other paths: {prefill}")
    return result | {
        "pools_gb": round(memory.pool_bytes / 1e9, 3) if memory else None,
        "workspace_gb": round(memory.workspace_bytes / 1e9, 3) if memory else None,
        "pipeline_depth": core.scheduler.config.pipeline_depth,
        "prefill_chunk": core.scheduler.config.prefill_chunk,
        "launches": {"decode": decode, "prefill": prefill},
        "problems": problems,
    }


def run_arm(options: argparse.Namespace) -> dict[str, Any]:
    """One arm, in this process."""
    numbers = random.Random(5)
    vocab_size = SHAPES[options.shape].vocab_size
    prompts = [[numbers.randrange(vocab_size) for _ in range(options.prompt_tokens)] for _ in range(options.sequences)]
    gc.collect()
    result = run_ours(options, prompts) if options.arm == "ours" else run_mlx_lm(options, prompts)
    if result["num_tokens"] != [options.output_tokens] * options.sequences:
        result["problems"].append(f"sequences gave {result['num_tokens']} tokens, wanted {options.output_tokens} each")
    return {"arm": options.arm} | result


def run_worker(options: argparse.Namespace, arm: str) -> dict[str, Any]:
    """One process of one arm; how it ended if it did not end well."""
    command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=options.time_limit_s)
    except subprocess.TimeoutExpired as error:
        tail = error.stderr or b""
        text = tail.decode(errors="replace") if isinstance(tail, bytes) else tail
        return {"arm": arm, "failed": f"no end within {options.time_limit_s:.0f} s: {text[-600:]}"}
    if done.returncode:
        return {"arm": arm, "failed": f"ended with status {done.returncode}: {done.stderr[-1500:]}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def ratios(results: list[dict[str, Any]], *, with_target: bool) -> dict[str, Any]:
    """Ours over mlx-lm's, and whether the target holds; None where an arm is missing or flawed.

    Args:
        results: One an arm.
        with_target: The run is the one that the target is meant for.
    """
    good = {result["arm"]: result for result in results if "failed" not in result and not result["problems"]}
    found: dict[str, Any] = {"peak": None, "beyond_weights": None, "wanted": MAX_RATIO, "met": None}
    if set(good) == set(ARMS):
        for name, key in (("peak", "peak_gb"), ("beyond_weights", "beyond_weights_gb")):
            found[name] = round(good["ours"][key] / good["mlx-lm"][key], 3)
        found["met"] = found["peak"] <= MAX_RATIO if with_target else None
    return found


def markdown(results: list[dict[str, Any]], found: dict[str, Any]) -> str:
    lines = [
        "| arm | peak, GB | beyond weights, GB | until first tokens, GB | after, GB | prompts, s | in all, s |",
        "|---|---|---|---|---|---|---|",
    ]
    keys = ("peak_gb", "beyond_weights_gb", "prompts_peak_gb", "decode_peak_gb", "prompts_s", "total_s")
    for result in results:
        lines.append(f"| {result['arm']} | " + " | ".join(str(result.get(key, "-")) for key in keys) + " |")
    if found["peak"] is not None:
        verdicts = {None: "", True: f" (met, <= {found['wanted']})", False: f" (**missed**, <= {found['wanted']})"}
        lines.append(
            f"\nours / mlx-lm: {found['peak']:.3f} of the peak{verdicts[found['met']]},"
            f" {found['beyond_weights']:.3f} of what lies beyond the weights"
        )
    for result in results:
        flaw = result.get("failed") or result["problems"]
        if flaw:
            lines.append(f"\nRejected: {result['arm']}: {flaw}")
    return "\n".join(lines)


def write(options: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Writes what was measured so far, and returns its ratios."""
    is_target = (options.shape, options.sequences, options.prompt_tokens) == (TARGET_SHAPE, 4, 16384)
    found = ratios(results, with_target=is_target)
    document = {
        "shape": options.shape,
        "sequences": options.sequences,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "page_size": options.page_size,
        "arms_complete": len(results),
        "ratio": found,
        "results": results,
    }
    write_run(options.out, document, complete=len(results) == len(ARMS))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("memory.json"))
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=16384)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--chunk", type=int, help="tokens of our chunks; the engine's default if not given")
    parser.add_argument("--page-size", type=int, default=32, help="the engine's default")
    parser.add_argument("--shape", default=TARGET_SHAPE, choices=SHAPES)
    parser.add_argument("--device", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--time-limit-s", type=float, default=120, help="of one process")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.sequences, options.output_tokens) < 1 or options.prompt_tokens < 2:
        parser.error("--sequences and --output-tokens must be at least 1, --prompt-tokens at least 2")
    if options.arm:
        print(json.dumps(run_arm(options)))
        return 0
    if options.device == "gpu":
        require_mlx_gpu(without="--device cpu --shape tiny --prompt-tokens 1024")
    results: list[dict[str, Any]] = []
    for arm in ARMS:
        results.append(run_worker(options, arm))
        found = write(options, results)
    print(markdown(results, found))
    return 1 if flaws(results) else 0


if __name__ == "__main__":
    sys.exit(main())

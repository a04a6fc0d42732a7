"""What Python costs beside the model in a steady decode step on the embedded model.

    python benchmarks/scheduling_overhead.py --out scheduling_overhead.json

Three parts of a step: the model call (forward pass and evaluated logits), the sampler, and the rest: scheduling, plan
and page tables, commit, delivery. "Outside the model" is the last two together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from run_record import write_run

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine
from mlxcel_paged.request import Request, SamplingParams, TokenEvent


def measure(batch: int, context: int, num_steps: int, temperature: float) -> dict[str, Any]:
    """Medians over the steps in which the whole batch decodes."""
    config = EngineConfig(parallel=batch, max_context=context + num_steps + 16, kv_cache_budget=None)
    engine = Engine(config)
    engine.start()
    model = engine.wait_until_ready(600)
    import mlx.core as mx  # after the engine has seen to the BLAS

    core = engine._core
    assert core is not None
    times: list[tuple[float, float, float]] = []  # model, sampler, whole step
    spent = {"model": 0.0, "sampler": 0.0}
    paged, tokens = core.runner._model, core.runner._tokens  # type: ignore[attr-defined]
    decode, sample, turn = paged.decode, tokens.sample, core.scheduler.schedule

    def timed_decode(inputs: Any) -> Any:
        started_at = time.perf_counter()
        logits = decode(inputs)
        mx.eval(logits)
        spent["model"] += time.perf_counter() - started_at
        return logits

    def timed_sample(logits: Any, step: Any) -> Any:
        started_at = time.perf_counter()
        result = sample(logits, step)
        spent["sampler"] += time.perf_counter() - started_at
        return result

    last = {"at": 0.0, "is_full": False}

    def timed_schedule() -> Any:
        """A step lasts from one call of the scheduler to the next."""
        now = time.perf_counter()
        if last["is_full"]:
            times.append((spent["model"], spent["sampler"], now - last["at"]))
        spent["model"] = spent["sampler"] = 0.0
        step = turn()
        last["at"], last["is_full"] = now, step is not None and len(step.decode) == batch and not step.prefill
        return step

    paged.decode, tokens.sample, core.scheduler.schedule = timed_decode, timed_sample, timed_schedule
    token_ids = list(model.tokenizer.encode("The harbour lay quiet in the fog, and the night watch wrote it down. "))
    done = threading.Semaphore(0)

    def on_event(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            done.release()

    sampling = SamplingParams(max_tokens=num_steps, temperature=temperature, top_p=0.95, seed=1, ignore_eos=True)
    requests = [
        Request(str(index), (token_ids * (context // len(token_ids) + 1))[: context - index % 7], sampling)
        for index in range(batch)
    ]
    engine.submit_many(requests, on_event)
    for _ in requests:
        done.acquire()
    engine.stop()
    rest = [whole - in_model - in_sampler for in_model, in_sampler, whole in times]
    whole_ms = statistics.median(whole for _, _, whole in times) * 1e3
    outside_ms = statistics.median(whole - in_model for in_model, _, whole in times) * 1e3
    return {
        "batch": batch,
        "context": context,
        "temperature": temperature,
        "num_steps": len(times),
        "step_ms": round(whole_ms, 3),
        "model_ms": round(statistics.median(in_model for in_model, _, _ in times) * 1e3, 3),
        "sampler_ms": round(statistics.median(in_sampler for _, in_sampler, _ in times) * 1e3, 3),
        "scheduling_ms": round(statistics.median(rest) * 1e3, 3),
        "outside_model_ms": round(outside_ms, 3),
        "outside_model_percent": round(100 * outside_ms / whole_ms, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, action="append", help="may be given several times (default: 4 and 64)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cells = [
        measure(batch, arguments.context, arguments.steps, arguments.temperature)
        for batch in arguments.batch or (4, 64)
    ]
    passed = all(
        (cell["batch"] != 4 or cell["outside_model_percent"] <= 3.0)
        and (cell["batch"] != 64 or cell["outside_model_ms"] <= 2.0)
        for cell in cells
    )
    document = {"cells": cells, "passed": passed}
    print(json.dumps(document, indent=1))
    if arguments.out:
        write_run(arguments.out, document, complete=True)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())

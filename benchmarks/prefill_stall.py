"""How long running streams are held up while a long prompt is prefilled beside them, by step budget.

    python benchmarks/prefill_stall.py --prompt 4096 --budget 516 --budget 132 --budget 68 --out prefill_stall.json

A budget is `--max-num-batched-tokens`: prompt tokens and decode rows of one step. Three streams decode; the time from
one of their tokens to the next is measured before and while the prompt is prefilled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_record import write_run

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine
from mlxcel_paged.request import Request, SamplingParams, TokenEvent

NUM_STREAMS = 3


def measure(prompt_length: int, budget: int) -> dict[str, Any]:
    """One engine, one prompt."""
    engine = Engine(
        EngineConfig(
            max_context=prompt_length + 64, max_num_batched_tokens=budget, prefix_cache=False, kv_cache_budget=1 << 30
        )
    )
    engine.start()
    model = engine.wait_until_ready(600)
    token_ids = list(model.tokenizer.encode("The harbour lay quiet in the fog, and the night watch wrote it down. "))
    times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    first_token_at: list[float] = []
    are_running, is_done = threading.Event(), threading.Event()

    def stream(index: int) -> Callable[[TokenEvent], None]:
        def on_event(_event: TokenEvent) -> None:
            times[index].append(time.monotonic())
            if min(map(len, times)) > 24:
                are_running.set()

        return on_event

    def on_long(event: TokenEvent) -> None:
        first_token_at.append(time.monotonic())
        if event.finish_reason is not None:
            is_done.set()

    endless = SamplingParams(max_tokens=prompt_length, temperature=0.0, ignore_eos=True)
    for index in range(NUM_STREAMS):
        engine.submit(Request(f"stream {index}", token_ids[: 8 + index], endless), stream(index))
    are_running.wait()
    submitted_at = time.monotonic()
    long_prompt = (token_ids * (prompt_length // len(token_ids) + 1))[:prompt_length]
    engine.submit(Request("long", long_prompt, SamplingParams(max_tokens=2, temperature=0.0)), on_long)
    is_done.wait()
    engine.stop()
    gaps = [(begin, end) for stamps in times for begin, end in itertools.pairwise(stamps)]
    before = [end - begin for begin, end in gaps if end <= submitted_at]
    during = [end - begin for begin, end in gaps if end > submitted_at and begin < first_token_at[0]]
    return {
        "prompt": prompt_length,
        "max_num_batched_tokens": budget,
        "time_to_first_token_s": round(first_token_at[0] - submitted_at, 2),
        "gap_before_median_ms": round(statistics.median(before) * 1e3, 1),
        "gap_during_median_ms": round(statistics.median(during) * 1e3, 1),
        "gap_during_max_ms": round(max(during) * 1e3, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--budget", type=int, action="append", help="may be given several times (default: 516 and 68)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cells = [measure(arguments.prompt, budget) for budget in arguments.budget or (516, 68)]
    document = {"cells": cells}
    print(json.dumps(document, indent=1))
    if arguments.out:
        write_run(arguments.out, document, complete=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Canary run: every request has a secret of its own after a preamble that all share, and must repeat its own alone.

    python benchmarks/canary.py --requests 200 --concurrency 8 --out canary.json
    python benchmarks/canary.py --requests 200 --concurrency 8 --pages 60 --out canary_preempted.json

Each prompt says `Secret: w` twice and then `Secret:`. Every answer is compared with the answer to the same request
alone; no answer may hold a secret of another. With `--pages` the pool is so small that sequences are preempted.
"""

from __future__ import annotations

import argparse
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from run_record import write_run
from server_process import ServerProcess, budget_for_pages

FIRST = ("amber", "brave", "clever", "dusty", "early", "fancy", "gentle", "happy", "icy", "jolly", "kind", "lucky",
         "merry", "noble", "orange", "proud", "quiet", "rapid")  # fmt: skip
SECOND = ("anchor", "badger", "candle", "dragon", "engine", "falcon", "garden", "hammer", "island", "jacket", "kettle",
          "ladder")  # fmt: skip
PREAMBLE = (
    "This is a list of notes that was kept by the night watch of a small harbour town. Each note holds one secret. "
    "The secret is written down three times, always in the same words, so that nobody gets it wrong.\n\n"
)


def secrets(count: int, seed: int) -> list[str]:
    """Distinct pairs of words."""
    pairs = [f"{first} {second}" for first in FIRST for second in SECOND]
    random.Random(seed).shuffle(pairs)
    return pairs[:count]


def prompt_of(secret: str) -> str:
    return f"{PREAMBLE}Secret: {secret}\nSecret: {secret}\nSecret:"


def judge(names: list[str], alone: list[str], together: list[str]) -> dict[str, Any]:
    """Counts what the run must show."""
    leaks = [
        {"secret": own, "answer": answer, "leaked": other}
        for own, answer in zip(names, together, strict=True)
        for other in names
        if other != own and other in answer
    ]
    different = [
        {"secret": own, "alone": first, "together": second}
        for own, first, second in zip(names, alone, together, strict=True)
        if first != second
    ]
    repeated = sum(answer.strip().startswith(own) for own, answer in zip(names, together, strict=True))
    return {
        "num_requests": len(names),
        "num_repeated": repeated,
        "share_repeated": repeated / len(names),
        "leaks": leaks,
        "different_from_solo": different,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--pages", type=int, help="pages of the pool, few enough to force preemption")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", default="", help="further flags of `serve`, separated by spaces")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    flags = ["--parallel", str(arguments.concurrency), "--page-size", "16", "--max-context", "1024"]
    flags += arguments.flags.split()
    if arguments.pages:
        flags += ["--kv-cache-budget", str(budget_for_pages(arguments.pages, *flags))]
    names = secrets(arguments.requests, arguments.seed)
    with ServerProcess(*flags) as server:

        def ask(secret: str) -> str:
            return server.complete(prompt_of(secret), max_tokens=arguments.max_tokens, ignore_eos=True)

        alone = [ask(secret) for secret in names]
        num_before = server.metrics()["preemptions_total"]
        with ThreadPoolExecutor(arguments.concurrency) as pool:
            together = list(pool.map(ask, names))
        metrics = server.wait_idle()
        result = {
            **judge(names, alone, together),
            "concurrency": arguments.concurrency,
            "num_pages": metrics["kv_pages_total"],
            "num_preemptions": metrics["preemptions_total"] - num_before,
            "num_prefix_hit_tokens": metrics["prefix_cache_hits_total"],
            "num_failed_steps": metrics["failed_steps_total"],
            "fused_launches": metrics.get('decode_launches_total{outcome="fused"}', 0.0),
        }
    result["passed"] = (
        not result["leaks"]
        and not result["different_from_solo"]
        and result["share_repeated"] >= 0.9
        and (arguments.pages is None or result["num_preemptions"] > 0)
    )
    print(json.dumps(result, indent=1))
    if arguments.out:
        write_run(arguments.out, result, complete=True)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

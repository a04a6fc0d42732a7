"""A mixed load for minutes: resident memory must be flat after warm-up, answers must not change, nothing may stay held.

    python benchmarks/soak_server.py --minutes 15 --out soak_server.json

Clients send short and long prompts, streams and whole answers, several answers at once, seeds, stop strings and wrong
requests, and some leave early. One request is repeated throughout and must always be answered alike. Memory is sampled
every few seconds; the first `--warm-up` part of the run is left out of the judgement.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from run_record import write_run
from server_process import ServerProcess

WORDS = ("the", "harbour", "lay", "quiet", "in", "fog", "and", "a", "night", "watch", "wrote", "down", "every", "ship",
         "that", "came", "from", "north", "or", "south")  # fmt: skip
PROBE = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}


class Load:
    """What the clients do and count."""

    def __init__(self, server: ServerProcess, until: float) -> None:
        self.server = server
        self.until = until
        self.lock = threading.Lock()
        self.counts = {"answered": 0, "left": 0, "refused": 0, "wrong_status": 0, "probes": 0, "changed_probes": 0}
        self.probe_text = server.complete(**PROBE)

    def count(self, name: str) -> None:
        with self.lock:
            self.counts[name] += 1

    def run(self, seed: int) -> None:
        source = random.Random(seed)
        while time.monotonic() < self.until:
            if source.random() < 0.1:
                text = self.server.complete(**PROBE)
                self.count("probes")
                if text != self.probe_text:
                    self.count("changed_probes")
            else:
                self.one(source)

    def one(self, source: random.Random) -> None:
        num_words = source.choice([1, 8, 40, 150, 600])
        fields: dict[str, Any] = {
            "prompt": " ".join(source.choice(WORDS) for _ in range(num_words)),
            "max_tokens": source.choice([1, 8, 32, 64]),
            "temperature": source.choice([0, 0.8]),
            "stream": source.random() < 0.6,
            "n": source.choice([1, 1, 2]),
        }
        if source.random() < 0.3:
            fields["seed"] = source.randrange(100)
        if source.random() < 0.2:
            fields["stop"] = [" the", "."]
        is_wrong = source.random() < 0.05
        if is_wrong:
            fields["max_tokens"] = -1
        connection = http.client.HTTPConnection(*self.server.address, timeout=300)
        try:
            connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
            if source.random() < 0.1:
                time.sleep(source.random() * 0.3)
                self.count("left")
                return
            answer = connection.getresponse()
            answer.read()
            expected = 400 if is_wrong else 200
            if answer.status == 429:
                self.count("refused")
                time.sleep(1.0)
            else:
                self.count("answered" if answer.status == expected else "wrong_status")
        finally:
            connection.close()


def slope_per_minute(samples: list[tuple[float, float]]) -> float:
    """Least-squares slope of (seconds, value)."""
    times, values = zip(*samples, strict=True)
    return statistics.linear_regression(times, values).slope * 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--warm-up", type=float, default=0.25, help="part of the run before memory is judged")
    parser.add_argument("--sample-s", type=float, default=5.0)
    parser.add_argument("--max-slope", type=float, default=1.0, help="MiB a minute that pass as flat")
    parser.add_argument("--flags", default="", help="further flags of `serve`, separated by spaces")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    flags = ["--max-context", "2048", "--kv-cache-budget", "192MiB", "--debug-endpoints", *arguments.flags.split()]
    with ServerProcess(*flags) as server:
        begun_at = time.monotonic()
        load = Load(server, begun_at + arguments.minutes * 60)
        before = server.get("/v1/debug/state")
        threads = [threading.Thread(target=load.run, args=(seed,)) for seed in range(arguments.clients)]
        for thread in threads:
            thread.start()
        samples: list[tuple[float, float]] = []
        mlx_samples: list[tuple[float, float]] = []
        while any(thread.is_alive() for thread in threads):
            now = time.monotonic() - begun_at
            samples.append((now, server.rss_bytes() / 2**20))
            metrics = server.metrics()
            held = metrics['mlx_memory_bytes{kind="active"}'] + metrics['mlx_memory_bytes{kind="cache"}']
            mlx_samples.append((now, held / 2**20))
            time.sleep(arguments.sample_s)
        metrics = server.wait_idle()
        time.sleep(1.0)
        after = server.get("/v1/debug/state")
        status = server.close()
    judged = [sample for sample in samples if sample[0] >= arguments.warm_up * arguments.minutes * 60]
    result: dict[str, Any] = {
        "minutes": arguments.minutes,
        **load.counts,
        "num_steps": metrics["steps_total"],
        "num_failed_steps": metrics["failed_steps_total"],
        "num_preemptions": metrics["preemptions_total"],
        "num_generated_tokens": metrics["generation_tokens_total"],
        "rss_mib_start": round(samples[0][1], 1),
        "rss_mib_after_warm_up": round(judged[0][1], 1),
        "rss_mib_end": round(judged[-1][1], 1),
        "rss_mib_max": round(max(value for _, value in judged), 1),
        "rss_mib_per_minute": round(slope_per_minute(judged), 3),
        "mlx_mib_end": round(mlx_samples[-1][1], 1),
        "state_before": before,
        "state_after": after,
        "exit_status": status,
        "rss_mib": [(round(at, 1), round(value, 1)) for at, value in samples],
    }
    result["passed"] = (
        result["rss_mib_per_minute"] <= arguments.max_slope
        and not load.counts["changed_probes"]
        and not load.counts["wrong_status"]
        and not result["num_failed_steps"]
        and all(after[name] == 0 for name in after if name not in ("object", "tasks", "threads"))
        and status == 0
    )
    print(json.dumps({name: value for name, value in result.items() if name != "rss_mib"}, indent=1))
    if arguments.out:
        write_run(arguments.out, result, complete=True)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""A thousand requests at once against a short queue: the rest is refused at once, and the admitted do not notice.

    python benchmarks/queue_flood.py --requests 1000 --queue 32 --out queue_flood.json

All connections are open before the first request is sent. Times of refusals are the server's own, from reading a
request to answering it (`request_rejection_time_seconds`); clients see more, because they share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from run_record import write_run
from server_process import ServerProcess, histogram_median

PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time", "One, two, three, four,"]
NUM_TOKENS = 24


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, index: int) -> tuple[int, bool, str, float]:
    """Returns status, whether Retry-After came, the text, and seconds."""
    fields = {"prompt": PROMPTS[index % 4], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    started_at = time.monotonic()
    writer.write(head.encode() + body)
    await writer.drain()
    answer = await reader.read()
    elapsed_s = time.monotonic() - started_at
    writer.close()
    headers, _, content = answer.partition(b"\r\n\r\n")
    status = int(headers.split(b" ", 2)[1])
    text = json.loads(content)["choices"][0]["text"] if status == 200 else ""
    return status, b"\r\nretry-after: " in headers.lower(), text, elapsed_s


async def flood(address: tuple[str, int], num_requests: int) -> list[tuple[int, bool, str, float]]:
    connections = []
    for _ in range(num_requests):
        connections.append(await asyncio.open_connection(*address))
    return list(await asyncio.gather(*(ask(*pair, index) for index, pair in enumerate(connections))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--queue", type=int, default=32)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    flags = ["--parallel", str(arguments.parallel), "--max-queued-requests", str(arguments.queue)]
    with ServerProcess(*flags, "--max-context", "1024") as server:
        alone = [server.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
        before = server.metrics()
        answers = asyncio.run(flood(server.address, arguments.requests))
        after = server.wait_idle()
        again = [server.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    admitted = [index for index, answer in enumerate(answers) if answer[0] == 200]
    refused = [answer for answer in answers if answer[0] == 429]
    mean_s = mean(before, after, "request_rejection_time_seconds")
    result: dict[str, Any] = {
        "num_requests": len(answers),
        "num_admitted": len(admitted),
        "num_refused": len(refused),
        "num_other": len(answers) - len(admitted) - len(refused),
        "num_without_retry_after": sum(not answer[1] for answer in refused),
        "refusal_server_median_at_most_ms": scaled(histogram_median(after, "request_rejection_time_seconds")),
        "refusal_server_mean_ms": scaled(mean_s),
        "refusal_client_median_ms": scaled(
            sorted(answer[3] for answer in refused)[len(refused) // 2] if refused else None
        ),
        "num_admitted_that_differ_from_solo": sum(answers[index][2] != alone[index % 4] for index in admitted),
        "is_same_afterwards": again == alone,
        "num_failed_steps": after["failed_steps_total"],
    }
    result["passed"] = (
        result["num_other"] == 0
        and result["num_without_retry_after"] == 0
        and arguments.queue <= len(admitted) <= arguments.requests
        and result["num_admitted_that_differ_from_solo"] == 0
        and result["is_same_afterwards"]
        and bool(refused)
        and result["refusal_server_median_at_most_ms"] <= 50
    )
    print(json.dumps(result, indent=1))
    if arguments.out:
        write_run(arguments.out, result, complete=True)
    return 0 if result["passed"] else 1


def mean(before: dict[str, float], after: dict[str, float], name: str) -> float | None:
    count = after[f"{name}_count"] - before[f"{name}_count"]
    return (after[f"{name}_sum"] - before[f"{name}_sum"]) / count if count else None


def scaled(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)


if __name__ == "__main__":
    raise SystemExit(main())

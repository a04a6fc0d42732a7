"""Clients that leave at random moments, by FIN or RST, until nothing of them may be left.

    python benchmarks/disconnect_storm.py --clients 2000 --out disconnect_storm.json

Moments: in the middle of the body, before the engine has seen the request, in the queue, in prefill, at the first byte,
in the middle of a stream, after the end. Afterwards pages, tasks and every table of the server must be as before, and
plain requests must give what they gave before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

from run_record import write_run
from server_process import ServerProcess

PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time", "One, two, three, four,"]
LONG = "The harbour lay quiet in the fog, and the night watch wrote down every ship that came in. " * 20


def leave(address: tuple[str, int], source: random.Random) -> None:
    """One client."""
    fields = {
        "prompt": source.choice([*PROMPTS, LONG]),
        "max_tokens": source.randrange(1, 120),
        "stream": source.random() < 0.7,
        "n": source.choice([1, 1, 1, 2]),
    }
    body = json.dumps(fields).encode()
    message = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    moment = source.random()
    connection = socket.create_connection(address, timeout=60)
    try:
        if moment < 0.1:
            connection.sendall(message[: source.randrange(1, len(message))])
        else:
            connection.sendall(message)
            if moment > 0.7:
                connection.settimeout(source.random() * 2)
                with contextlib.suppress(TimeoutError):
                    connection.recv(source.randrange(1, 4096))
                    if moment > 0.9:
                        connection.recv(65536)
            elif moment > 0.2:
                time.sleep(source.random() ** 2 * 0.5)
    except ConnectionError:
        pass  # refused with 429 and closed, for instance
    finally:
        if source.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def settled(server: ServerProcess, before: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
    """The state once it is as before, or the last one."""
    until = time.monotonic() + timeout_s
    while True:
        state: dict[str, Any] = server.get("/v1/debug/state")
        if state == before or time.monotonic() > until:
            return state
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with ServerProcess("--max-context", "2048", "--debug-endpoints") as server:
        alone = [server.complete(prompt, max_tokens=16) for prompt in PROMPTS]
        server.wait_idle()
        time.sleep(1.0)  # connections of the requests above close
        before = server.get("/v1/debug/state")
        left = iter(range(arguments.clients))
        lock = threading.Lock()

        def work(seed: int) -> None:
            source = random.Random(f"{arguments.seed} {seed}")
            while True:
                with lock:
                    if next(left, None) is None:
                        return
                leave(server.address, source)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(arguments.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        metrics = server.wait_idle()
        after = settled(server, before)
        again = [server.complete(prompt, max_tokens=16) for prompt in PROMPTS * 5]
        log = [line for line in server.log if "Traceback" in line or "Error" in line]
        status = server.close()
    result = {
        "num_clients": arguments.clients,
        "state_before": before,
        "state_after": after,
        "kv_pages_used": metrics["kv_pages_used"],
        "num_aborted": metrics.get('requests_aborted_total{reason="client_left"}', 0.0),
        "num_finished": {
            reason: metrics[f'requests_finished_total{{reason="{reason}"}}']
            for reason in ("stop", "length", "abort", "error")
        },
        "num_refused": metrics.get('requests_rejected_total{reason="queue_full"}', 0.0),
        "num_failed_steps": metrics["failed_steps_total"],
        "is_same_afterwards": again == alone * 5,
        "tracebacks": log,
        "exit_status": status,
    }
    result["passed"] = (
        before == after
        and result["is_same_afterwards"]
        and not metrics["failed_steps_total"]
        and not log
        and status == 0
    )
    print(json.dumps(result, indent=1))
    if arguments.out:
        write_run(arguments.out, result, complete=True)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

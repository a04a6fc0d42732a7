"""A `mlxcel-paged serve` of its own for one measurement: started, asked, and ended as a user would."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class ServerProcess:
    """Starts on construction and is ready then.

    Args:
        flags: further flags of `serve`.

    Attributes:
        url: where it listens.
        log: the last lines that it wrote.
    """

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "mlxcel_paged", "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.url = ""
        self.log: deque[str] = deque(maxlen=200)
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._is_ready.wait(600) or not self.url:
            self.process.kill()
            raise RuntimeError("the server did not start:\n" + "\n".join(self.log))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if found := re.match(r"listening on (http://\S+)", line):
                self.url = found[1]
            if line.startswith("ready: "):
                self._is_ready.set()
        self._is_ready.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> int:
        """Ends it with SIGTERM and returns its status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def get(self, path: str) -> Any:
        """A JSON answer."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        """The JSON answer to a JSON request."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(fields).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            body: dict[str, Any] = json.load(answer)
            return body

    def complete(self, prompt: str | list[int], **fields: Any) -> str:
        """The text of a completion, greedy unless told otherwise."""
        body = self.post("/v1/completions", **{"prompt": prompt, "temperature": 0, **fields})
        text: str = body["choices"][0]["text"]
        return text

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels, without the prefix."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name.removeprefix("mlxcel_paged_"): float(value) for name, _, value in samples}

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        [kib] = re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.M)
        return int(kib) * 1024

    def wait_idle(self, timeout_s: float = 120.0) -> dict[str, float]:
        """Waits until nothing runs, waits or is held; returns the metrics of that moment.

        Raises:
            RuntimeError: it never came to that.
        """
        until = time.monotonic() + timeout_s
        while True:
            metrics = self.metrics()
            held = {name: metrics[name] for name in ("num_requests_running", "num_requests_waiting", "kv_pages_used")}
            if not any(held.values()):
                return metrics
            if time.monotonic() > until:
                raise RuntimeError(f"never idle: {held}")
            time.sleep(0.05)


def budget_for_pages(num_pages: int, *flags: str) -> int:
    """Bytes of `--kv-cache-budget` that hold exactly `num_pages` pages with these flags."""
    with ServerProcess(*flags) as server:
        stats = server.get("/v1/cache/stats")
    pages = sum(group["pages_total"] for group in stats["groups"])
    return int(stats["workspace_bytes"]) + num_pages * int(stats["pool_bytes"]) // pages


def histogram_median(metrics: dict[str, float], name: str) -> float | None:
    """Upper bound of the bucket that holds a histogram's median; None without samples."""
    count = metrics.get(f"{name}_count", 0.0)
    buckets = [
        (float(found[1]), value)
        for sample, value in metrics.items()
        if (found := re.fullmatch(rf'{name}_bucket{{le="([^"]+)"}}', sample))
    ]
    return next((bound for bound, value in sorted(buckets) if value >= count / 2), None) if count else None

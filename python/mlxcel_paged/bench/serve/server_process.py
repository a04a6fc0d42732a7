"""A server in a process of its own: started on a free port, waited for, and ended whatever happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx

from mlxcel_paged import env
from mlxcel_paged.errors import PagedError

_POLL_S = 0.1
_KEPT_LINES = 40
_SHUTDOWN_TIMEOUT_S = 45.0
_LISTENING = re.compile(r"^listening on (http://\S+)")


class ServerStartError(PagedError, RuntimeError):
    """A server did not become ready."""

    slug = "server_start"


@contextmanager
def running_server(
    arguments: Sequence[str], *, environment: Mapping[str, str], start_timeout_s: float
) -> Iterator[str]:
    """Runs `mlxcel-paged serve` with `arguments` on a free port of the loopback address; yields its URL when ready.

    The process is told to end on leaving the block, killed if it does not, and ends by itself if this process dies.

    Raises:
        ServerStartError: it ended or was not ready in time; the message has its last lines.
    """
    command = [sys.executable, "-m", "mlxcel_paged.bench.serve.child", "serve", "--host", "127.0.0.1", "--port", "0"]
    # A signal from the terminal goes to the whole process group; the server is to wait for ours.
    process = subprocess.Popen(
        [*command, *arguments],
        # A key in the environment is for the servers of this machine's users; ours are asked without one.
        env={name: value for name, value in os.environ.items() if name != env.API_KEY} | dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    output = _Output(process)
    try:
        yield _wait_until_ready(process, output, time.monotonic() + start_timeout_s)
    finally:
        _end(process)
        output.close()


def wait_while_loading(url: str, timeout_s: float) -> None:
    """Waits while a server that somebody else runs answers /health with 503; what else it answers is not judged.

    Raises:
        ServerStartError: it does not answer, or is not ready in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", trust_env=False, timeout=10).status_code != 503:
                return
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerStartError(f"the server at {url} does not answer: {type(error).__name__}: {error}") from error
        time.sleep(_POLL_S)
    raise ServerStartError(f"the server at {url} was not ready in time (hint: --start-timeout)")


class _Output:
    """Reads what a server writes, so that it never blocks, and remembers its address and its last lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.url: str | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process = process
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def tail(self) -> str:
        return "\n".join(list(self._lines))

    def close(self) -> None:
        """Ends the reading of a process that has ended."""
        self._thread.join(_SHUTDOWN_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.rstrip("\n"))
            listening = _LISTENING.match(line)
            if listening:
                self.url = listening.group(1)


def _wait_until_ready(process: subprocess.Popen[str], output: _Output, deadline: float) -> str:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerStartError(f"the server ended with status {process.returncode}:\n{output.tail()}")
        if output.url is not None and _is_healthy(output.url):
            return output.url
        time.sleep(_POLL_S)
    raise ServerStartError(f"the server was not ready in time (hint: --start-timeout); it wrote:\n{output.tail()}")


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()

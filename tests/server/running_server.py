"""A real server on a free loopback port, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx

from mlxcel_paged.server.app import create_app
from mlxcel_paged.server.config import ServerConfig
from mlxcel_paged.server.serve import listen, make_server


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Fails, rather than hangs, when something never comes true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.002)


class RunningServer:
    """Starts on construction; `close` shuts it down as a signal would."""

    def __init__(self, engine: Any, config: ServerConfig | None = None, *, port: int = 0) -> None:
        self.engine = engine
        self.config = replace(config or ServerConfig(), port=port)
        self._listener = listen(self.config)
        self.host, self.port = self._listener.getsockname()[:2]
        self.app = create_app(engine, self.config)
        self.service = self.app.state.service
        self.server = make_server(self.app, self.config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[self._listener])))
        self._thread.start()
        wait_until(lambda: self.server.started, "the server has started")
        self.client = httpx.Client(base_url=f"http://{self.host}:{self.port}", timeout=30, trust_env=False)

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._listener.close()

    def wait_idle(self) -> None:
        """Every leak would show here: sequences, pages, connections' tasks."""
        wait_until(lambda: not any(self.service.counts().values()), "nothing is open in the server")
        wait_until(lambda: not any(self.engine.counts().values()), "the engine remembers no request")
        stats = self.engine.stats
        wait_until(lambda: stats().num_requests_running + stats().num_requests_waiting == 0, "the engine is idle")
        wait_until(lambda: stats().kv_pages_used == 0, "no page is held")
        wait_until(lambda: not self.server.server_state.tasks, "no task is left")

    def post(self, path: str, **fields: Any) -> httpx.Response:
        # Surrogates go out escaped; httpx would refuse to encode them.
        return self.client.post(path, content=json.dumps(fields))

    def complete(self, **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **fields: Any) -> list[Any]:
        """The data of a whole stream; the last one is "[DONE]" if it ended well."""
        with self.client.stream("POST", path, json={**fields, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return [parse_event(line) for line in response.iter_lines() if line.startswith("data: ")]

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=30)

    def send_raw(self, path: str, body: bytes, *, method: str = "POST", headers: str = "") -> socket.socket:
        """Sends a request over a bare socket and leaves the answer unread."""
        connection = self.connect()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        connection.sendall(head.encode() + body)
        return connection

    def metric(self, sample: str) -> float:
        """The value of one sample line of /metrics, labels included."""
        lines = self.client.get("/metrics").text.splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == sample]
        assert len(values) == 1, (sample, lines)
        return float(values[0])


def parse_event(line: str) -> Any:
    data = line.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


def stream_text(events: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream of either endpoint."""
    text = ""
    for event in events:
        if event == "[DONE]":
            continue
        for choice in event["choices"]:
            if choice["index"] == index:
                text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return text


def read_all(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def reset(connection: socket.socket) -> None:
    """Closes with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()

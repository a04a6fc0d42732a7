"""A server over a scripted engine for every test that asks for one; every test ends with the leak check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlxcel_paged.server.config import ServerConfig

from .running_server import RunningServer
from .scripted_engine import ScriptedEngine


@pytest.fixture
def start() -> Iterator[Callable[..., RunningServer]]:
    """Starts servers with engine settings and, under `config`, server settings."""
    servers: list[RunningServer] = []

    def start_one(config: ServerConfig | None = None, **engine_settings: Any) -> RunningServer:
        server = RunningServer(ScriptedEngine(**engine_settings), config)
        servers.append(server)
        return server

    yield start_one
    for server in servers:
        try:
            server.engine.go_on()
            server.wait_idle()
        finally:
            server.close()
            server.engine.stop()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    server = RunningServer(ScriptedEngine(), ServerConfig(max_body_bytes=1 << 20))
    yield server
    server.close()
    server.engine.stop()


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """One server per module for the tests that only send requests."""
    yield shared_server
    shared_server.wait_idle()

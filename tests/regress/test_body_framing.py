"""A body whose end is told in two ways.

The fault class: request smuggling. A proxy goes by Content-Length and the server by Transfer-Encoding, so that what one
takes for the rest of a body is the next request to the other.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.running_server import RunningServer, read_all
from server.scripted_engine import ScriptedEngine


@pytest.fixture
def server() -> Any:
    running = RunningServer(ScriptedEngine())
    yield running
    running.wait_idle()
    running.close()
    running.engine.stop()


def test_a_length_beside_chunks_is_refused_and_ends_the_connection(server: RunningServer) -> None:
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 46\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"0\r\n\r\n" + smuggled
        )
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"

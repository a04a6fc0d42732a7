"""Clients that leave: their requests are aborted at once wherever they are, and nothing of them is left."""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import suppress

import pytest

from mlxcel_paged.server.config import ServerConfig

from .running_server import RunningServer, reset, stream_text, wait_until

URL = "/v1/completions"


def endless(stream: bool) -> bytes:
    return json.dumps({"prompt": "x" * 20, "max_tokens": 10**6, "stream": stream}).encode()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["fin", "rst"])
class TestOneClientThatLeaves:
    def leave(self, connection, how: str) -> None:
        reset(connection) if how == "rst" else connection.close()

    def test_while_its_tokens_come(self, start, stream: bool, how: str) -> None:
        server = start(step_s=0.01, max_context=10**6, max_pool_tokens=10**6)
        connection = server.send_raw(URL, endless(stream))
        wait_until(lambda: server.engine.num_tokens > 2, "tokens are generated")
        assert server.metric("mlxcel_paged_kv_pages_used") > 0
        self.leave(connection, how)
        server.wait_idle()
        assert server.engine.num_aborts == 1
        assert server.metric("mlxcel_paged_kv_pages_used") == 0
        assert server.metric('mlxcel_paged_requests_finished_total{reason="abort"}') == 1

    def test_before_the_first_token(self, start, stream: bool, how: str) -> None:
        server = start()
        server.engine.hold()
        connection = server.send_raw(URL, endless(stream))
        wait_until(lambda: server.engine.num_alive == 1, "the request is submitted")
        self.leave(connection, how)
        wait_until(lambda: server.engine.num_alive == 0, "the request is aborted while the engine stands still")
        assert server.engine.num_tokens == 0

    def test_while_it_waits_in_the_queue(self, start, stream: bool, how: str) -> None:
        server = start(parallel=1, step_s=0.01, max_context=10**6, max_pool_tokens=10**6)
        runs = server.send_raw(URL, endless(True))
        wait_until(lambda: server.engine.stats().num_requests_running == 1, "one runs")
        waits = server.send_raw(URL, endless(stream))
        wait_until(lambda: server.engine.stats().num_requests_waiting == 1, "one waits")
        self.leave(waits, how)
        wait_until(lambda: server.engine.num_alive == 1, "the one that waited is gone")
        assert server.engine.stats().num_requests_running == 1
        runs.close()


def test_leaving_in_the_middle_of_a_body(server: RunningServer) -> None:
    before = server.engine.num_submitted
    for how in (reset, lambda connection: connection.close()):
        connection = server.connect()
        connection.sendall(f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        how(connection)
    server.wait_idle()
    assert server.engine.num_submitted == before


def test_leaving_with_several_prompts_aborts_all(start) -> None:
    server = start(parallel=2, step_s=0.01, max_context=10**6, max_pool_tokens=10**6)
    body = json.dumps({"prompt": ["a", "b", "c", "d"], "max_tokens": 10**6}).encode()
    connection = server.send_raw(URL, body)
    wait_until(lambda: server.engine.num_alive == 4, "all are submitted")
    connection.close()
    server.wait_idle()
    assert server.engine.num_aborts == 4


def test_a_client_that_stops_reading_and_leaves_is_noticed(start) -> None:
    server = start(max_context=10**6, max_pool_tokens=10**6)
    body = json.dumps({"prompt": "x" * 1000, "max_tokens": 200_000, "stream": True}).encode()
    connection = server.send_raw(URL, body)
    wait_until(lambda: server.engine.num_tokens > 20_000, "the socket's buffers are full")
    assert server.client.get("/health").status_code == 200
    connection.close()
    server.wait_idle()


def cut(server: RunningServer, rng: random.Random, patience_s: float = 10.0) -> None:
    """One client that leaves at a random moment: in its body, before or after the first byte, or after the end."""
    stream = rng.random() < 0.7
    prompt = "x" * rng.randrange(1, 60)
    body = json.dumps({"prompt": prompt, "max_tokens": rng.randrange(1, 300), "stream": stream}).encode()
    connection = server.connect()
    head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    moment = rng.random()
    try:
        if moment < 0.1:
            connection.sendall((head + body)[: rng.randrange(1, len(head + body))])
        else:
            connection.sendall(head + body)
            if moment > 0.9:
                connection.settimeout(patience_s)
                with suppress(TimeoutError):
                    connection.recv(rng.randrange(1, 4096))
            elif moment > 0.3:
                time.sleep(rng.random() * 0.03)
    finally:
        reset(connection) if rng.random() < 0.5 else connection.close()


def test_500_random_disconnects_leave_nothing_behind(start) -> None:
    server = start(step_s=0.001)

    def leave_often(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(125):
            cut(server, rng)

    threads = [threading.Thread(target=leave_often, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.wait_idle()
    assert server.metric("mlxcel_paged_kv_pages_used") == 0
    for index in range(20):
        fields = {"prompt": f"abc{index}", "max_tokens": 40}
        text = server.complete(**fields)["choices"][0]["text"]
        assert text == (f"abc{index}" * 20)[:40]
        assert stream_text(server.events(URL, **fields)) == text
    server.wait_idle()
    wait_until(lambda: len(server.server.server_state.connections) <= 1, "only the kept connection is left")


def test_the_neighbours_of_a_client_that_leaves_are_unharmed(start) -> None:
    server = start(parallel=4, step_s=0.002)
    texts: list[str] = []

    def stay() -> None:
        texts.append(stream_text(server.events(URL, prompt="stay😀", max_tokens=200)))

    stayers = [threading.Thread(target=stay) for _ in range(3)]
    for thread in stayers:
        thread.start()
    rng = random.Random(1)
    while any(thread.is_alive() for thread in stayers):
        cut(server, rng)
    for thread in stayers:
        thread.join()
    expected = ("stay😀".encode() * 50)[:200].decode()
    assert texts == [expected] * 3


def test_a_silent_stream_is_kept_alive_and_a_dead_client_is_noticed_meanwhile(start) -> None:
    server = start(ServerConfig(keepalive_interval_s=0.05))
    server.engine.hold()
    connection = server.send_raw(URL, json.dumps({"prompt": "ab", "max_tokens": 2, "stream": True}).encode())
    with connection, connection.makefile("rb") as answer:
        assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
        lines = [answer.readline() for _ in range(40)]
        assert sum(line.startswith(b": keepalive") for line in lines) >= 2
        assert not any(line.startswith(b"data:") for line in lines)
    wait_until(lambda: server.engine.num_alive == 0, "the client's leaving is noticed")

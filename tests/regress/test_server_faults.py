"""Faults of other servers, by the number that notes on them give, on the real engine with the embedded model."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.conftest import check_drained
from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine
from mlxcel_paged.server.config import ServerConfig
from server.running_server import RunningServer, read_all, reset, wait_until

pytestmark = pytest.mark.model
URL = "/v1/completions"
PAGE = 16
WORDS = ("anchor", "badger", "candle", "dragon", "engine", "falcon", "garden", "hammer")
PREAMBLE = "This is a list of notes that the night watch of a small harbour town kept. Each note holds one secret.\n\n"


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., RunningServer]]:
    """Servers by the engine's settings, shared by the tests of this module."""
    servers: dict[str, RunningServer] = {}

    def get(**settings: Any) -> RunningServer:
        from mlxcel_paged.engine.build import build_core

        key = repr(sorted(settings.items()))
        if key not in servers:
            queue = {"max_queued_requests": settings.pop("max_queued_requests", 256)}
            config = EngineConfig(**{"max_context": 512, "page_size": PAGE, "parallel": 8, **settings})
            engine = Engine(config, build=build_core, log_plan=True, **queue)
            engine.start()
            engine.wait_until_ready(120)
            servers[key] = RunningServer(engine, ServerConfig(debug_endpoints=True))
        return servers[key]

    yield get
    for server in servers.values():
        check_drained(server.engine)
        server.close()
        assert server.engine.stop(timeout_s=60)


@pytest.fixture
def server(serve: Callable[..., RunningServer]) -> Iterator[RunningServer]:
    shared = serve()
    yield shared
    shared.wait_idle()
    state = shared.client.get("/v1/debug/state").json()
    assert all(state[name] == 0 for name in state if name not in ("object", "tasks", "threads"))


def note(secret: str) -> str:
    return f"{PREAMBLE}Secret: {secret}\nSecret: {secret}\nSecret:"


def text_of(server: RunningServer, prompt: str, max_tokens: int, **fields: Any) -> str:
    fields = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    text: str = server.complete(**fields)["choices"][0]["text"]
    return text


def small_pool(num_pages: int) -> int:
    """A budget of so many pages of the embedded model: 30 layers, 3 KV heads of 64, f32, and its workspace."""
    return num_pages * 2 * 30 * 3 * 64 * PAGE * 4 + (1 << 20)


@pytest.mark.parametrize("pool", ["ample", "short", "without a prefix cache"])
def test_b22_every_request_repeats_its_own_secret_and_no_other(serve: Callable[..., RunningServer], pool: str) -> None:
    settings: dict[str, dict[str, Any]] = {
        "ample": {},
        "short": {"kv_cache_budget": small_pool(15)},
        "without a prefix cache": {"prefix_cache": False},
    }
    server = serve(**settings[pool])
    num_tokens = 44 if pool == "short" else 12
    alone = [text_of(server, note(secret), num_tokens) for secret in WORDS]
    before = server.engine.stats()
    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(lambda secret: text_of(server, note(secret), num_tokens), WORDS))
    assert together == alone
    for own, answer in zip(WORDS, together, strict=True):
        assert not [other for other in WORDS if other != own and other in answer]
    repeated = [answer.strip().startswith(own) for own, answer in zip(WORDS, together, strict=True)]
    assert sum(repeated) >= 0.9 * len(WORDS)
    after = server.engine.stats()
    assert (after.num_preemptions > before.num_preemptions) == (pool == "short")
    assert (after.kv.num_prefix_hits > 0) == (pool != "without a prefix cache")
    server.wait_idle()


def test_b51_a_flood_is_refused_at_once_and_the_admitted_do_not_notice(serve: Callable[..., RunningServer]) -> None:
    server = serve(parallel=2, max_queued_requests=4)
    expected = text_of(server, note("anchor"), 12)
    body = json.dumps({"prompt": note("anchor"), "max_tokens": 12, "temperature": 0, "ignore_eos": True}).encode()
    connections = [server.send_raw(URL, body, headers="Connection: close\r\n") for _ in range(40)]
    answers = [read_all(connection) for connection in connections]
    for connection in connections:
        connection.close()
    statuses = [int(answer.split(b" ", 2)[1]) for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 6
    for status, answer in zip(statuses, answers, strict=True):
        if status == 200:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == expected
        else:
            assert b"\r\nretry-after: " in answer.lower()
    response = server.post(URL, prompt=["x"] * 7, max_tokens=1)
    assert response.status_code == 400  # more than the queue ever holds
    server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_b50_a_prompt_of_twice_the_context_is_refused_with_both_numbers(server: RunningServer, stream: bool) -> None:
    response = server.post(URL, prompt=[5] * 1024, stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "1024" in error["message"]
    assert "512" in error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_b57_a_client_that_leaves_costs_a_step_more_at_most(server: RunningServer, stream: bool) -> None:
    fields = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": stream}
    connection = server.send_raw(URL, json.dumps(fields).encode())
    wait_until(lambda: server.engine.stats().num_requests_running == 1, "it runs")
    num_steps = server.engine.stats().num_steps
    connection.close()
    wait_until(lambda: server.engine.stats().num_requests_running == 0, "it is withdrawn")
    # One in flight and one that saw the abort; more only while this machine let nobody look.
    assert server.engine.stats().num_steps - num_steps <= 10


def test_b62_clients_that_leave_cause_no_traceback(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for index in range(40):
            fields = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "stream": index % 2 == 0}
            connection = server.send_raw(URL, json.dumps(fields).encode())
            time.sleep(0.005 * (index % 6))
            reset(connection) if index % 3 else connection.close()
        server.wait_idle()
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_b1_an_engine_that_dies_answers_everybody_and_health_says_so() -> None:
    from mlxcel_paged.engine.build import build_core

    engine = Engine(EngineConfig(max_context=512, parallel=2), build=build_core)
    engine.start()
    engine.wait_until_ready(120)
    server = RunningServer(engine)
    try:
        core = engine._core
        assert core is not None

        def broken(*_arguments: Any) -> Any:
            raise SystemExit("the thread is killed")

        statuses: list[int] = []
        stream = server.send_raw(
            URL,
            json.dumps({"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode(),
            headers="Connection: close\r\n",
        )
        stream.recv(16)
        threads = [
            threading.Thread(
                target=lambda: statuses.append(
                    server.post(URL, prompt="x", max_tokens=400, ignore_eos=True).status_code
                )
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: engine.stats().num_requests_running + engine.stats().num_requests_waiting == 5, "all are in")
        core.runner.collect = broken  # type: ignore[method-assign]
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert statuses == [503] * 4
        answer = read_all(stream).decode()
        stream.close()
        assert '"code": "engine_failed"' in answer
        assert "[DONE]" not in answer
        for path in ("/health", "/health/ready", "/health/live"):
            assert server.client.get(path).status_code == 503
        assert server.post(URL, prompt="x").status_code == 503
        assert server.metric("mlxcel_paged_kv_pages_used") == 0
        del core
    finally:
        server.close()
        engine.stop(timeout_s=60)


def test_the_kill_switch_moves_every_decode_launch_to_gather(
    serve: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    fused, gather = (
        f'mlxcel_paged_decode_launches_total{{outcome="{name}"}}' for name in ("fused", "gather:kill_switch")
    )
    prompts = [note(secret) for secret in WORDS[:4]]
    expected = [text_of(server, prompt, 12) for prompt in prompts]
    num_fused = server.metric(fused)
    assert num_fused > 0
    monkeypatch.setenv("MLXCEL_PAGED_ATTENTION_NATIVE", "0")
    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(lambda prompt: text_of(server, prompt, 12), prompts)) == expected
    server.wait_idle()
    assert server.metric(fused) == num_fused
    assert server.metric(gather) > 0
    monkeypatch.delenv("MLXCEL_PAGED_ATTENTION_NATIVE")
    assert text_of(server, prompts[0], 12) == expected[0]
    assert server.metric(fused) > num_fused


def test_dense_storage_never_touches_a_page(serve: Callable[..., RunningServer]) -> None:
    paged, dense = serve(), serve(decode_storage="dense")
    prompts = [note(secret) for secret in WORDS[:3]]
    assert [text_of(dense, prompt, 12) for prompt in prompts] == [text_of(paged, prompt, 12) for prompt in prompts]
    stats = dense.client.get("/v1/cache/stats").json()
    assert (stats["groups"], stats["pool_bytes"], stats["workspace_bytes"]) == ([], 0, 0)
    text = dense.client.get("/metrics").text
    assert 'decode_launches_total{outcome="fused"} 0.0' in text
    assert "gather" not in text.replace("# HELP", "")
    for name in ("kv_pages_total", "kv_pages_peak", "kv_pages_used", "kv_pages_cached"):
        assert dense.metric(f"mlxcel_paged_{name}") == 0
    dense.wait_idle()


def test_plan_changes_of_a_request_are_shown_with_their_cost(server: RunningServer) -> None:
    text_of(server, note("anchor"), 20)
    body = server.client.get("/v1/debug/plan").json()
    causes = {event["cause"] for event in body["events"]}
    assert {"admit", "retire", "page_crossing", "resplit"} <= causes
    assert all(event["cost_us"] >= 0 for event in body["events"])
    assert sum(body["counts"].values()) >= len(body["events"])

"""Engines that load, fail, refuse and die: honest status codes, no clean end of a broken stream, no hanging client."""

from __future__ import annotations

import json
import threading
import time

import pytest

from mlxcel_paged.server.config import ServerConfig

from .running_server import read_all, wait_until

URL = "/v1/completions"


class _StepError(RuntimeError):
    slug = "step_failed"


def error_of(response, status: int) -> dict[str, object]:
    assert response.status_code == status, response.text
    return response.json()["error"]


def in_thread(work) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def test_while_the_model_loads_everything_but_metrics_is_503(start) -> None:
    server = start(state="loading")
    for response in (
        server.client.get("/health"),
        server.client.get("/v1/models"),
        server.client.get("/v1/models/default"),
        server.post(URL, prompt="x"),
        server.post(URL, prompt="x", stream=True),
        server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}]),
    ):
        error = error_of(response, 503)
        assert error["code"] == "model_loading"
        assert error["type"] == "server_error"
        assert int(response.headers["retry-after"]) >= 1
    assert server.metric("mlxcel_paged_num_requests_running") == 0
    server.engine.state = "ready"
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.complete(prompt="ab", max_tokens=2)["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("stream", [True, False])
def test_a_failed_step_is_500_and_the_engine_goes_on(start, stream: bool) -> None:
    server = start()
    server.engine.hold()
    thread, results = in_thread(lambda: server.post(URL, prompt="secret words", max_tokens=5, stream=stream))
    wait_until(lambda: server.engine.num_alive == 1, "submitted")
    server.engine.fail_next_step(_StepError("of 'secret words' and other people's prompts"))
    server.engine.go_on()
    thread.join()
    error = error_of(results[0], 500)
    assert (error["code"], error["type"]) == ("step_failed", "server_error")
    assert "secret" not in error["message"]
    assert server.complete(prompt="ab", max_tokens=2)["choices"][0]["text"] == "ab"
    assert server.metric('mlxcel_paged_requests_finished_total{reason="error"}') == 1
    assert server.metric('mlxcel_paged_requests_rejected_total{reason="step_failed"}') == 1
    assert server.metric("mlxcel_paged_failed_steps_total") == 1


@pytest.mark.parametrize("url", [URL, "/v1/chat/completions"])
def test_a_stream_that_fails_after_its_headers_ends_in_an_error_event(start, url: str) -> None:
    server = start(step_s=0.005, max_context=10**5)
    fields = {"max_tokens": 10**5, "stream": True, "ignore_eos": True}
    fields |= {"prompt": "ab"} if url == URL else {"messages": [{"role": "user", "content": "x"}]}
    headers = "Connection: close\r\n"
    with server.send_raw(url, json.dumps(fields).encode(), headers=headers) as connection:
        begin = connection.recv(65536)
        assert begin.startswith(b"HTTP/1.1 200 ")
        server.engine.fail_next_step(_StepError("boom"))
        answer = (begin + read_all(connection)).decode()
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    error = json.loads(events[-1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "step_failed"
    assert "[DONE]" not in answer
    assert '"finish_reason":"' not in answer


def test_one_failed_prompt_of_several_fails_the_request_and_aborts_the_rest(start) -> None:
    server = start(parallel=1, step_s=0.01, max_context=10**6, max_pool_tokens=10**6)
    server.engine.hold()
    thread, results = in_thread(lambda: server.post(URL, prompt=["a", "b", "c"], max_tokens=10**6))
    wait_until(lambda: server.engine.num_alive == 3, "submitted")
    server.engine.fail_next_step(_StepError("boom"))
    server.engine.go_on()
    thread.join()
    error_of(results[0], 500)
    server.wait_idle()
    assert server.engine.num_aborts == 2


def test_when_the_engine_dies_every_waiter_is_answered_and_health_says_so(start) -> None:
    server = start(parallel=1)
    server.engine.hold()
    waiters = [in_thread(lambda: server.post(URL, prompt="x", max_tokens=3)) for _ in range(3)]
    wait_until(lambda: server.engine.num_alive == 3, "submitted")
    server.engine.die(RuntimeError("the device is gone"))
    for thread, results in waiters:
        thread.join(20)
        assert error_of(results[0], 503)["code"] == "engine_failed"
    assert error_of(server.client.get("/health"), 503)["code"] == "engine_failed"
    assert error_of(server.post(URL, prompt="x"), 503)["code"] == "engine_failed"
    assert server.client.get("/v1/models").status_code == 503
    assert server.client.get("/metrics").status_code == 200
    server.engine.state = "failed"


def test_an_engine_that_dies_without_a_word_hangs_nobody(start) -> None:
    server = start(ServerConfig(keepalive_interval_s=0.05))
    server.engine.hold()
    thread, results = in_thread(lambda: server.post(URL, prompt="x", max_tokens=3))
    wait_until(lambda: server.engine.num_alive == 1, "submitted")
    server.engine.state = "failed"
    thread.join(20)
    assert error_of(results[0], 503)["code"] == "engine_failed"
    server.engine.state = "ready"


def test_a_full_queue_is_429_with_retry_after(start) -> None:
    server = start(parallel=1, max_waiting=1)
    server.engine.hold()
    thread, results = in_thread(lambda: server.post(URL, prompt="x", max_tokens=3))
    wait_until(lambda: server.engine.num_alive == 1, "one waits")
    for stream in (True, False):
        response = server.post(URL, prompt="y", stream=stream)
        error = error_of(response, 429)
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1
    error_of(server.post(URL, prompt=["y", "z"]), 429)
    server.engine.go_on()
    thread.join()
    assert results[0].status_code == 200


def test_open_sequences_are_bounded_by_the_server_itself(start) -> None:
    server = start(ServerConfig(max_open_sequences=3))
    server.engine.hold()
    thread, results = in_thread(lambda: server.post(URL, prompt=["a", "b"], max_tokens=1))
    wait_until(lambda: server.engine.num_alive == 2, "two are open")
    error_of(server.post(URL, prompt=["c", "d"]), 429)
    one_more, more_results = in_thread(lambda: server.post(URL, prompt="c", max_tokens=1))
    wait_until(lambda: server.engine.num_alive == 3, "three are open")
    error_of(server.post(URL, prompt="d"), 429)
    server.engine.go_on()
    for waiter in (thread, one_more):
        waiter.join()
    assert (results[0].status_code, more_results[0].status_code) == (200, 200)
    assert server.complete(prompt="d", max_tokens=1)["choices"][0]["text"] == "d"


def test_a_bug_in_the_engines_submit_is_a_500_without_details(start, caplog: pytest.LogCaptureFixture) -> None:
    server = start()

    def broken(*_args) -> None:
        raise KeyError("internals")

    server.engine.submit_many = broken
    error = error_of(server.post(URL, prompt="x"), 500)
    assert error["code"] == "internal_error"
    assert "internals" not in error["message"]
    assert "internals" in caplog.text


def test_a_bug_in_the_server_is_a_500_with_openais_body(start, caplog: pytest.LogCaptureFixture) -> None:
    server = start()

    def broken(*_args) -> None:
        raise KeyError("internals")

    server.service.in_text_thread = broken
    error = error_of(server.post(URL, prompt="x"), 500)
    assert error["code"] == "internal_error"
    assert "internals" in caplog.text


def test_shutdown_lets_running_requests_finish(start) -> None:
    server = start(step_s=0.01)
    thread, results = in_thread(lambda: server.post(URL, prompt="ab", max_tokens=50))
    wait_until(lambda: server.engine.num_tokens > 1, "it runs")
    server.server.should_exit = True
    thread.join()
    assert results[0].json()["choices"][0]["text"] == "ab" * 25


def test_a_shutdown_that_takes_too_long_tells_every_client(start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(ServerConfig(shutdown_timeout_s=1), step_s=0.01, max_context=10**6, max_pool_tokens=10**6)
    fields = {"prompt": "x", "max_tokens": 10**6}
    thread, results = in_thread(lambda: server.post(URL, **fields))
    body = json.dumps({**fields, "stream": True}).encode()
    with server.send_raw(URL, body) as connection:
        wait_until(lambda: server.engine.num_tokens > 10, "both run")
        server.server.should_exit = True
        answer = read_all(connection).decode()
    thread.join()
    assert error_of(results[0], 503)["code"] == "aborted"
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-1])["error"]["code"] == "aborted"
    assert "[DONE]" not in answer
    assert server.engine.num_alive == 0
    assert "aborted 2 sequences" in caplog.text
    assert not any(record.exc_info for record in caplog.records)


def test_a_client_that_does_not_read_delays_shutdown_for_a_moment_only(start, caplog, monkeypatch) -> None:
    monkeypatch.setattr("mlxcel_paged.server.serve.UNREAD_PATIENCE_S", 1)
    server = start(ServerConfig(shutdown_timeout_s=1), max_context=10**6, max_pool_tokens=10**6)
    body = json.dumps({"prompt": "x" * 1000, "max_tokens": 200_000, "stream": True}).encode()
    with server.send_raw(URL, body):
        wait_until(lambda: server.engine.num_tokens > 20_000, "the socket's buffers are full")
        server.close()
    assert server.engine.num_alive == 0
    assert "did not read" in caplog.text
    assert not any(record.exc_info for record in caplog.records)


def test_while_draining_nothing_new_is_taken_and_what_runs_goes_on(start) -> None:
    server = start(ServerConfig(keepalive_interval_s=0.05))
    server.engine.hold()
    thread, results = in_thread(lambda: server.post(URL, prompt="ab", max_tokens=4))
    wait_until(lambda: server.engine.num_alive == 1, "submitted")
    server.service.begin_drain()
    assert error_of(server.client.get("/health"), 503)["code"] == "engine_stopped"
    assert server.client.get("/health/live").status_code == 200
    assert error_of(server.post(URL, prompt="x"), 503)["code"] == "engine_stopped"
    time.sleep(0.2)  # several keep-alive intervals
    server.engine.go_on()
    thread.join()
    assert results[0].json()["choices"][0]["text"] == "abab"


def test_live_and_ready_are_two_questions(start) -> None:
    server = start(state="loading")

    def statuses() -> list[int]:
        return [server.client.get(path).status_code for path in ("/health", "/health/ready", "/health/live")]

    assert statuses() == [503, 503, 200]
    server.engine.state = "ready"
    assert statuses() == [200, 200, 200]
    server.engine.is_stalled = True
    assert error_of(server.client.get("/health"), 503)["code"] == "engine_stalled"
    assert statuses() == [503, 503, 503]
    server.engine.is_stalled = False
    server.engine.state = "failed"
    assert statuses() == [503, 503, 503]


def test_a_flood_is_refused_before_anything_is_tokenized(start) -> None:
    server = start(parallel=1, max_waiting=2)
    server.engine.hold()
    calls = []
    inner = server.service.in_text_thread

    async def counted(work):
        calls.append(1)
        return await inner(work)

    server.service.in_text_thread = counted
    waiters = [in_thread(lambda: server.post(URL, prompt="x", max_tokens=3)) for _ in range(2)]
    wait_until(lambda: server.engine.num_alive == 2, "the queue is full")
    for _ in range(5):
        assert int(server.post(URL, prompt="y").headers["retry-after"]) >= 1
    assert len(calls) == 2
    assert server.metric("mlxcel_paged_request_rejection_time_seconds_count") == 5
    server.engine.go_on()
    for thread, results in waiters:
        thread.join()
        assert results[0].status_code == 200

"""The client against a server over a scripted engine, and against one that breaks off."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from mlxcel_paged.bench.serve.client import complete, new_client
from mlxcel_paged.bench.serve.load import send_all
from mlxcel_paged.bench.serve.record import BenchRequest, RequestRecord
from mlxcel_paged.bench.serve.scrape import ServerCounts, scrape_counts, scrape_model
from server.running_server import RunningServer
from server.scripted_engine import ScriptedEngine
from text.byte_tokenizer import spell


@pytest.fixture
def server() -> Iterator[RunningServer]:
    server = RunningServer(ScriptedEngine(step_s=0.005))
    yield server
    server.engine.go_on()
    server.wait_idle()
    server.close()
    server.engine.stop()


def url(server: RunningServer) -> str:
    return f"http://{server.host}:{server.port}"


def run_one(base_url: str, request: BenchRequest) -> RequestRecord:
    async def run() -> RequestRecord:
        async with new_client(base_url) as client:
            return await complete(client, request)

    return asyncio.run(run())


def test_answer_is_whole_and_timed(server: RunningServer) -> None:
    record = run_one(url(server), BenchRequest(spell(server.engine.tokenizer, "hello"), 12))
    assert record.error is None
    assert record.text == "hellohellohe"
    assert record.num_output_tokens == len(record.chunk_times) == 12
    assert record.sent_at < record.chunk_times[0] < record.chunk_times[-1]
    assert record.latency_s == pytest.approx(record.ttft_s + sum(record.itls_s))


def test_request_runs_to_its_length_past_the_end_of_sequence(server: RunningServer) -> None:
    eos = server.engine.tokenizer.eos_token_id
    record = run_one(url(server), BenchRequest([97, eos, 98], 5))
    assert record.error is None
    assert record.num_output_tokens == 5


def test_failures_are_told(server: RunningServer) -> None:
    assert "HTTP 400" in str(run_one(url(server), BenchRequest([10**6], 2)).error)
    assert "context" in str(run_one(url(server), BenchRequest([97] * 600, 2)).error)
    assert "were asked for" in str(run_one(url(server), BenchRequest([97] * 511, 2)).error)
    server.engine.fail_next_step(RuntimeError("out of luck"))
    assert "HTTP 500" in str(run_one(url(server), BenchRequest([97], 2)).error)


def test_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "ConnectError" in str(run_one(f"http://127.0.0.1:{port}", BenchRequest([97], 2)).error)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'data: {"choices": [{"text": "a"}]}\n\n', "without [DONE]"),
        (b'data: {"error": {"message": "died"}}\n\n', "died"),
        (b"data: [DONE]\n\n", "without a chunk"),
        (b"data: 7\n\n", "no chunk"),
        (b"data: {}\n\n", "no chunk"),
        (b'data: {"choices": [{"te', "without [DONE]"),
        (b': ping\r\n\r\ndata: {"choices": [{"text": "a"}]}\r\n\r\ndata: [DONE]\r\n\r\n', "0 tokens came"),
    ],
)
def test_stream_that_is_not_a_whole_answer(body: bytes, said: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(head + body)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # closing with the request unread would reset the connection
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        record = run_one(f"http://127.0.0.1:{listener.getsockname()[1]}", BenchRequest([97], 2))
        thread.join()
    assert said in str(record.error)


def test_no_more_requests_are_in_flight_than_clients(server: RunningServer) -> None:
    seen: list[int] = []

    async def run() -> list[RequestRecord]:
        async with new_client(url(server)) as client:
            requests = [
                BenchRequest(spell(server.engine.tokenizer, letter), 3 + index % 3)
                for index, letter in enumerate("abcdefghi")
            ]
            records, duration_s = await send_all(
                client,
                requests,
                max_concurrency=2,
                on_done=lambda _: seen.append(server.service.open_sequences.num_open),
            )
        assert duration_s >= max(record.latency_s for record in records)
        return records

    records = asyncio.run(run())
    assert [record.text[0] for record in records] == list("abcdefghi")
    assert max(seen) <= 2
    assert len(seen) == 9
    overlaps = sorted([(r.sent_at, 1) for r in records] + [(r.chunk_times[-1], -1) for r in records])
    depth = [sum(change for _, change in overlaps[: index + 1]) for index in range(len(overlaps))]
    assert max(depth) == 2


def test_requests_are_sent_when_they_arrive(server: RunningServer) -> None:
    async def run() -> list[RequestRecord]:
        async with new_client(url(server)) as client:
            requests = [BenchRequest([97], 2, arrival_s) for arrival_s in (0.0, 0.15, 0.3)]
            return (await send_all(client, requests, max_concurrency=None))[0]

    sent_at = [record.sent_at for record in asyncio.run(run())]
    assert sent_at[1] - sent_at[0] >= 0.1
    assert sent_at[2] - sent_at[0] >= 0.25


def test_launches_and_model_are_read_from_the_server(server: RunningServer) -> None:
    async def run() -> None:
        async with new_client(url(server)) as client:
            assert await scrape_model(client) == ("scripted/echo", server.engine.model.vocab_size)
            before = await scrape_counts(client)
            await complete(client, BenchRequest([97], 3))
            server.engine.decode_launches["gather:forced"] = 7
            after = await scrape_counts(client)
        assert before == ServerCounts({"fused": 0}, 256)
        assert after is not None
        assert after.since(before) == ServerCounts({"fused": 6, "gather:forced": 7}, 256, 3)

    asyncio.run(run())

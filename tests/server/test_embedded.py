"""The server over the real engine and the embedded model."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine
from mlxcel_paged.server.serve import example

from .running_server import RunningServer, stream_text, wait_until
from .test_disconnect import cut

pytestmark = pytest.mark.model
URL = "/v1/completions"
PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time", "In 1969 the first man on the moon"]
NUM_TOKENS = [3, 10, 6, 8]


@pytest.fixture(scope="module")
def embedded() -> Iterator[RunningServer]:
    from mlxcel_paged.engine.build import build_core

    # MLX is imported already in a test process, too late to choose its BLAS.
    engine = Engine(EngineConfig(max_context=512), build=build_core)
    engine.start()
    server = RunningServer(engine)
    assert server.client.get("/health").status_code in (200, 503)
    engine.wait_until_ready(120)
    yield server
    server.close()
    engine.stop()


@pytest.fixture
def server(embedded: RunningServer) -> Iterator[RunningServer]:
    yield embedded
    embedded.wait_idle()
    assert embedded.metric("mlxcel_paged_kv_pages_used") == 0


def test_a_question_is_answered(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    response = server.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=20)
    [choice] = response.json()["choices"]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"
    assert "/v1/chat/completions" in example(server.engine, "http://x")


def test_four_streams_together_give_what_each_gives_alone(server: RunningServer) -> None:
    def run(index: int) -> list:
        fields = {"prompt": PROMPTS[index], "max_tokens": NUM_TOKENS[index], "temperature": 0}
        return server.events(URL, **fields, stream_options={"include_usage": True})

    alone = [run(index) for index in range(4)]
    together: dict[int, list] = {}
    threads = [threading.Thread(target=lambda i=index: together.update({i: run(i)})) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(4):
        assert stream_text(together[index]) == stream_text(alone[index])
        assert together[index][-2]["usage"] == alone[index][-2]["usage"]
        assert alone[index][-2]["usage"]["completion_tokens"] <= NUM_TOKENS[index]
    assert server.metric('mlxcel_paged_decode_launches_total{outcome="fused"}') > 0
    outcomes = [line for line in server.client.get("/metrics").text.splitlines() if "decode_launches_total{" in line]
    assert len(outcomes) == 1


def test_whole_and_streamed_answers_agree_on_text_and_usage(server: RunningServer) -> None:
    for stop in (None, [".", "zzz"]):
        fields = {"prompt": PROMPTS[0], "max_tokens": 10, "temperature": 0, "stop": stop}
        whole = server.complete(**fields)
        events = server.events(URL, **fields, stream_options={"include_usage": True})
        assert stream_text(events) == whole["choices"][0]["text"]
        assert events[-2]["usage"] == whole["usage"]


def test_a_seed_repeats(server: RunningServer) -> None:
    fields = {"prompt": [PROMPTS[2]] * 2, "max_tokens": 6, "temperature": 1.5, "seed": 7}
    first, second = (choice["text"] for choice in server.complete(**fields)["choices"])
    assert first == second == server.complete(**{**fields, "prompt": PROMPTS[2]})["choices"][0]["text"]


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(server: RunningServer) -> None:
    response = server.post(URL, prompt=[5] * 700)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    for word in ("context", "700", "512"):
        assert word in error["message"]


def test_token_ids_outside_the_vocabulary_are_refused(server: RunningServer) -> None:
    for token_id in (49152, 2**31, -1):
        assert server.post(URL, prompt=[1, token_id]).json()["error"]["param"] == "prompt"


def test_a_client_that_leaves_frees_its_pages_within_a_step(server: RunningServer) -> None:
    for stream in (b"true", b"false"):
        body = b'{"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": true, "stream": ' + stream + b"}"
        connection = server.send_raw(URL, body)
        wait_until(lambda: server.engine.stats().kv_pages_used > 0, "pages are held")
        num_steps = server.engine.stats().num_steps
        connection.close()
        wait_until(lambda: server.engine.stats().kv_pages_used == 0, "pages are free")
        # The step in flight when the client left, the one that saw the abort, and the noise of a busy machine.
        assert server.engine.stats().num_steps - num_steps <= 10


def test_500_random_disconnects_then_20_requests(server: RunningServer) -> None:
    before = server.complete(prompt=PROMPTS[0], max_tokens=3, temperature=0)["choices"]

    def leave_often(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(125):
            cut(server, rng, patience_s=0.3)

    threads = [threading.Thread(target=leave_often, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.wait_idle()
    assert server.metric("mlxcel_paged_kv_pages_used") == 0
    for _ in range(20):
        assert server.complete(prompt=PROMPTS[0], max_tokens=3, temperature=0)["choices"] == before

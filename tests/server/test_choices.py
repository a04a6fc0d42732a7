"""Several answers to one prompt: their order, their seeds, their count in every limit."""

from __future__ import annotations

from mlxcel_paged.random_stream import choice_seed
from mlxcel_paged.server.config import ServerConfig

from .running_server import RunningServer, stream_text

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_choices_come_prompt_by_prompt_in_order(server: RunningServer) -> None:
    body = server.complete(prompt=["ab", "xy"], n=3, max_tokens=2)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "ab"), (1, "ab"), (2, "ab"), (3, "xy"), (4, "xy"), (5, "xy"),
    ]  # fmt: skip
    # A prompt counts once however many answers it has.
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}


def test_streams_are_interleaved_and_each_choice_ends_once(server: RunningServer) -> None:
    events = server.events(CHAT, messages=[{"role": "user", "content": "hello"}], n=3)
    order = [event["choices"][0]["index"] for event in events[:-1]]
    assert set(order) == {0, 1, 2}
    assert order != sorted(order)
    for index in range(3):
        assert stream_text(events, index) == "user\nhello"
        choices = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
        assert choices[-1]["finish_reason"] == "stop"


def test_every_choice_has_a_stream_of_its_own_and_the_first_is_that_of_n_1(server: RunningServer) -> None:
    server.complete(prompt="a", n=3, seed=-5, max_tokens=1)
    requests = list(server.engine.last_requests)[-3:]
    assert [request.sampling.seed for request in requests] == [choice_seed(-5, choice) for choice in range(3)]
    assert requests[0].sampling.seed == -5
    server.complete(prompt="a", n=2, max_tokens=1)
    assert [request.sampling.seed for request in list(server.engine.last_requests)[-2:]] == [None, None]


def test_best_of_must_be_n(server: RunningServer) -> None:
    assert len(server.complete(prompt="a", n=2, best_of=2, max_tokens=1)["choices"]) == 2
    for best_of in (1, 3):
        response = server.post(COMPLETIONS, prompt="a", n=2, best_of=best_of)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")


def test_prompts_times_n_are_bounded(server: RunningServer) -> None:
    response = server.post(COMPLETIONS, prompt=["a"] * 3, n=43)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_n_counts_in_the_queue_and_all_or_none_are_taken(start) -> None:
    server = start(parallel=1, max_waiting=4)
    server.engine.hold()
    before = server.engine.num_submitted
    response = server.post(CHAT, messages=[{"role": "user", "content": "x"}], n=5)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert response.headers["retry-after"]
    assert server.engine.num_submitted == before
    assert server.engine.num_alive == 0
    server.engine.go_on()
    assert server.post(CHAT, messages=[{"role": "user", "content": "x"}], n=4).status_code == 200


def test_n_counts_among_the_open_sequences(start) -> None:
    server = start(ServerConfig(max_open_sequences=3))
    assert server.post(COMPLETIONS, prompt="a", n=4, max_tokens=1).status_code == 429
    assert server.post(COMPLETIONS, prompt="a", n=3, max_tokens=1).status_code == 200

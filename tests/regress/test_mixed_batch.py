"""Requests that want different things of the sampler share a batch without noticing each other.

The fault class: a batch of requests with and without logits processors raises, or one request's penalties, seed or
grammar reach another (mlx-lm #1472; vLLM #17524 for seeds).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from server.embedded import embedded_server
from server.running_server import RunningServer, stream_text

pytestmark = pytest.mark.model
URL = "/v1/chat/completions"
CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
COLOURS = [{"role": "user", "content": "Name some colours."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"messages": CAPITAL, "temperature": 0, "max_tokens": 5},
    "penalty": {
        "messages": COLOURS, "temperature": 0, "max_tokens": 8,
        "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2,
    },
    "logit_bias": {"messages": CAPITAL, "temperature": 0, "max_tokens": 5, "logit_bias": {"504": -100}},
    "seed": {"messages": COLOURS, "temperature": 1.3, "max_tokens": 6, "seed": 11},
    "logprobs": {"messages": CAPITAL, "temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 4},
    "json_schema": {
        "messages": CAPITAL, "temperature": 0, "max_tokens": 16,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    },
    "stop": {"messages": CAPITAL, "temperature": 0, "max_tokens": 5, "stop": [" of Fr"]},
    "stream": {"messages": CAPITAL, "temperature": 0, "max_tokens": 5, "stream": True},
}  # fmt: skip


def ask(server: RunningServer, kind: str) -> Any:
    """All that an answer says, but for its name and time."""
    fields = dict(KINDS[kind])
    if fields.pop("stream", False):
        events = server.events(URL, **fields, stream_options={"include_usage": True})
        assert events[-1] == "[DONE]"
        return [stream_text(events), events[-2]["usage"], events[-3]["choices"][0]["finish_reason"]]
    response = server.post(URL, **fields)
    assert response.status_code == 200, response.text
    body = response.json()
    return [body["choices"], body["usage"]]


def ask_together(server: RunningServer, kinds: tuple[str, ...]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    threads = [threading.Thread(target=lambda k=kind: answers.update({k: ask(server, k)})) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    # A prompt that is cut into other chunks or found in the prefix cache has other last bits. Here each prompt is one
    # chunk, so that even log-probabilities are equal.
    with embedded_server(parallel=8, max_num_batched_tokens=4096, prefill_chunk=4096, prefix_cache=False) as running:
        yield running


@pytest.fixture(scope="module")
def solo(server: RunningServer) -> dict[str, Any]:
    return {kind: ask(server, kind) for kind in KINDS}


def text_of(answer: Any) -> str:
    return answer[0][0]["message"]["content"]


def test_every_kind_does_something(solo: dict[str, Any]) -> None:
    plain = text_of(solo["plain"])
    assert plain.startswith("The capital of France")
    assert text_of(solo["logit_bias"]) != plain
    assert not text_of(solo["logit_bias"]).startswith("The")
    assert text_of(solo["logprobs"]) == solo["stream"][0] == plain
    assert len(solo["logprobs"][0][0]["logprobs"]["content"]) == solo["logprobs"][1]["completion_tokens"] == 5
    for token in solo["logprobs"][0][0]["logprobs"]["content"]:
        # Greedy decoding takes the first of the most likely tokens.
        assert token["top_logprobs"][0]["logprob"] == token["logprob"] <= 0
        assert len(token["top_logprobs"]) == 4
    assert text_of(solo["stop"]) == "The capital"
    assert solo["stop"][0][0]["finish_reason"] == "stop"
    assert set(json.loads(text_of(solo["json_schema"]))) == {"city"}
    words = text_of(solo["penalty"]).lower().split()
    assert len(words) == len(set(words))


def test_a_seed_repeats_and_another_seed_differs(server: RunningServer, solo: dict[str, Any]) -> None:
    assert ask(server, "seed") == solo["seed"]
    other = server.post(URL, **{**KINDS["seed"], "seed": 12}).json()
    assert other["choices"][0]["message"]["content"] != text_of(solo["seed"])


@pytest.mark.parametrize("kinds", list(combinations(KINDS, 2)), ids="-".join)
def test_two_kinds_together_give_what_each_gives_alone(
    server: RunningServer, solo: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    assert ask_together(server, kinds) == {kind: solo[kind] for kind in kinds}


def test_all_kinds_together_give_what_each_gives_alone(server: RunningServer, solo: dict[str, Any]) -> None:
    assert ask_together(server, tuple(KINDS)) == solo


def test_a_request_with_penalties_joins_while_a_long_prompt_is_prefilled(
    server: RunningServer, solo: dict[str, Any]
) -> None:
    long = {"prompt": [504] * 250, "max_tokens": 3, "temperature": 0}
    alone = server.complete(**long)["choices"]
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.complete(**long)["choices"]))
    thread.start()
    assert ask(server, "penalty") == solo["penalty"]
    thread.join()
    assert answers == [alone]


def test_choices_of_one_seed_differ_and_repeat_in_any_company(server: RunningServer) -> None:
    fields = {"messages": COLOURS, "temperature": 1.5, "max_tokens": 4, "seed": 3}

    def texts(n: int) -> list[str]:
        return [choice["message"]["content"] for choice in server.post(URL, **fields, n=n).json()["choices"]]

    four = texts(4)
    assert len(set(four)) == 4
    assert texts(1) == four[:1]
    assert texts(2) == four[:2]


def test_with_prompts_from_the_prefix_cache_the_texts_are_the_same(solo: dict[str, Any]) -> None:
    def texts(answers: dict[str, Any]) -> dict[str, str]:
        return {kind: answer[0] if kind == "stream" else text_of(answer) for kind, answer in answers.items()}

    with embedded_server(parallel=8) as server:
        for _ in range(2):
            assert texts(ask_together(server, tuple(KINDS))) == texts(solo)
        assert ask(server, "logprobs")[1]["prompt_tokens_details"]["cached_tokens"] > 0

"""`logprobs` is accepted and nothing is returned, or what is returned does not belong to the tokens.

omlx #1549, vllm-mlx #786, vmlx #127; and mlx-lm's server, whose entries need not be the sampled token's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from server.embedded import embedded_server
from server.running_server import RunningServer

pytestmark = pytest.mark.model
URL = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Write one emoji and a word in Greek."}],
    "logprobs": True, "top_logprobs": 3, "max_tokens": 10, "temperature": 1.8, "seed": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    # A prompt found in the prefix cache has other last bits.
    with embedded_server(prefix_cache=False) as running:
        yield running


def whole(server: RunningServer, **fields: Any) -> tuple[list[dict[str, Any]], str, int]:
    body = server.post(URL, **{**ASK, **fields}).json()
    [choice] = body["choices"]
    return choice["logprobs"]["content"], choice["message"]["content"], body["usage"]["completion_tokens"]


def test_every_token_is_reported_and_its_bytes_are_the_text(server: RunningServer) -> None:
    content, text, num_tokens = whole(server)
    assert len(content) == num_tokens
    joined = b"".join(bytes(token["bytes"] or []) for token in content)
    assert joined.decode("utf-8", "replace") == text
    for token in content:
        assert -9999 <= token["logprob"] <= 0
        assert len(token["top_logprobs"]) == 3
        by_token = {top["token"]: top["logprob"] for top in token["top_logprobs"]}
        # The sampled token is among the likely ones with its own number, or less likely than all of them.
        assert by_token.get(token["token"], token["logprob"]) == token["logprob"]
        assert token["token"] in by_token or token["logprob"] <= min(by_token.values())
        assert sum(math.exp(top["logprob"]) for top in token["top_logprobs"]) <= 1 + 1e-5


def test_a_stream_has_the_same_reports(server: RunningServer) -> None:
    events = server.events(URL, **ASK)
    parts = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert [token for part in parts if part for token in part["content"]] == whole(server)[0]


def test_what_changes_the_choice_does_not_change_the_models_own_distribution(server: RunningServer) -> None:
    first = whole(server)[0][0]["top_logprobs"]
    assert whole(server, temperature=0)[0][0]["top_logprobs"] == first
    assert whole(server, top_k=1, repetition_penalty=5)[0][0]["top_logprobs"] == first


def test_a_token_that_a_bias_forces_has_the_models_probability(server: RunningServer) -> None:
    content, _, _ = whole(server, logit_bias={"5000": 100}, temperature=0, max_tokens=2)
    assert {token["token"] for token in content} == {content[0]["token"]}
    assert all(token["logprob"] < -3 for token in content)
    assert content[0]["token"] not in {top["token"] for top in content[0]["top_logprobs"]}

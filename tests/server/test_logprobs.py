"""Log-probabilities in both endpoints' shapes, streamed and whole: the same tokens, the same bytes, finite numbers."""

from __future__ import annotations

from typing import Any

import pytest

from .running_server import RunningServer, stream_text

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "né \U0001f469\u200d\U0001f680!"  # characters of one, two, three and four bytes


def chat_content(server: RunningServer, stream: bool, **fields: Any) -> tuple[list[dict[str, Any]], str, int]:
    """Token objects, text and usage of a chat answer."""
    fields = {"messages": [{"role": "user", "content": TEXT}], **fields}
    if stream:
        events = server.events(CHAT, **fields, stream_options={"include_usage": True})
        parts = [event["choices"][0]["logprobs"] for event in events[:-2]]
        content = [token for part in parts if part for token in part["content"]]
        return content, stream_text(events), events[-2]["usage"]["completion_tokens"]
    body = server.post(CHAT, **fields).json()
    [choice] = body["choices"]
    return choice["logprobs"]["content"], choice["message"]["content"], body["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_reports_every_token_with_its_bytes(server: RunningServer, stream: bool) -> None:
    content, text, num_tokens = chat_content(server, stream, logprobs=True, top_logprobs=3)
    assert text == "user\n" + TEXT
    assert len(content) == num_tokens
    assert b"".join(bytes(token["bytes"] or []) for token in content) == text.encode()
    for token in content:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        assert [set(top) for top in token["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 3
        # -inf is clamped: JSON has none.
        assert [top["logprob"] for top in token["top_logprobs"]] == [-0.25, -1.5, -9999.0]
        assert token["top_logprobs"][0]["token"] == token["token"]
    assert (content[0]["token"], content[0]["bytes"]) == ("<|turn|>", None)
    assert (content[-1]["token"], content[-1]["bytes"]) == ("<|end|>", None)
    assert (content[1]["token"], content[1]["bytes"]) == ("u", [ord("u")])
    # Half a character has no text, so its bytes are spelled.
    assert [token["token"] for token in content[7:9]] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_a_stream_reports_what_a_whole_answer_reports(server: RunningServer) -> None:
    for stop in (None, "\u200d"):
        fields = {"logprobs": True, "top_logprobs": 2, "stop": stop}
        assert chat_content(server, True, **fields) == chat_content(server, False, **fields)


def test_without_top_logprobs_the_lists_are_empty(server: RunningServer) -> None:
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 0}):
        content, _, _ = chat_content(server, False, **fields)
        assert {tuple(token["top_logprobs"]) for token in content} == {()}


def test_nothing_is_reported_unasked(server: RunningServer) -> None:
    for fields in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": None}, {"top_logprobs": 0}):
        body = server.post(CHAT, messages=[{"role": "user", "content": "x"}], **fields).json()
        assert body["choices"][0]["logprobs"] is None
    response = server.post(CHAT, messages=[{"role": "user", "content": "x"}], top_logprobs=2)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")
    for value in (21, -1, True, "2", 1.0):
        response = server.post(CHAT, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=value)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")


def completion_lists(server: RunningServer, stream: bool, **fields: Any) -> tuple[dict[str, list[Any]], str]:
    if not stream:
        [choice] = server.complete(**fields)["choices"]
        return choice["logprobs"], choice["text"]
    events = server.events(COMPLETIONS, **fields)
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in events[:-1]:
        for name in joined:
            joined[name] += event["choices"][0]["logprobs"][name]
    return joined, stream_text(events)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_report_parallel_lists(server: RunningServer, stream: bool) -> None:
    lists, text = completion_lists(server, stream, prompt="aé\U0001f680b", logprobs=2, max_tokens=8)
    assert text == "aé\U0001f680b"
    assert lists["tokens"][0] == "a"
    assert lists["tokens"][-1] == "b"
    assert lists["token_logprobs"] == [-0.25] * 8
    assert all(list(top.values()) == [-0.25, -1.5] for top in lists["top_logprobs"])
    # Where the text of a token starts: a character belongs to the token that completes it.
    assert lists["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]


def test_completions_with_logprobs_0_report_the_sampled_token_alone(server: RunningServer) -> None:
    lists, _ = completion_lists(server, False, prompt="ab", logprobs=0, max_tokens=2)
    assert lists == {"tokens": ["a", "b"], "token_logprobs": [-0.25] * 2, "top_logprobs": None, "text_offset": [0, 1]}

"""/v1/chat/completions: conversations, their shape, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from text.byte_tokenizer import byte_tokenizer

from .running_server import RunningServer, stream_text

URL = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
# The engine repeats the rendered prompt, whose first special token has no text and whose <|end|> ends the answer.
ECHO = "user\nHi"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(server: RunningServer, **fields: Any) -> dict[str, Any]:
    response = server.post(URL, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_whole_answer_has_openais_shape(server: RunningServer) -> None:
    body = chat(server, messages=USER)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ECHO, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    # The turn token, the text and the end token; the prompt has the assistant's header besides.
    assert body["usage"]["completion_tokens"] == 1 + len(ECHO) + 1
    assert body["usage"]["prompt_tokens"] == body["usage"]["completion_tokens"] + len("\n") + 1 + len("assistant\n")


def test_a_stream_opens_with_the_role_and_closes_with_the_reason(server: RunningServer) -> None:
    events = server.events(URL, messages=USER, stream_options={"include_usage": True})
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["usage"] == chat(server, messages=USER)["usage"]
    assert {event["object"] for event in [*events, usage]} == {"chat.completion.chunk"}
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert all(set(delta) == {"content"} for delta in deltas[1:-1])
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["stop"]
    assert stream_text(events) == ECHO


def test_without_max_tokens_the_context_is_the_limit(server: RunningServer) -> None:
    body = chat(server, messages=USER, ignore_eos=True)
    assert body["usage"]["total_tokens"] == server.engine.max_context
    assert body["choices"][0]["finish_reason"] == "length"


def test_parts_of_text_follow_each_other(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert chat(server, messages=[{"role": "user", "content": parts}])["choices"][0]["message"]["content"] == ECHO


def test_a_developer_is_a_system(server: RunningServer) -> None:
    for role in ("developer", "system"):
        body = chat(server, messages=[{"role": role, "content": "Be."}, *USER])
        assert body["choices"][0]["message"]["content"] == "system\nBe."


def test_an_answer_can_be_sent_back_as_it_came(server: RunningServer) -> None:
    message = chat(server, messages=USER)["choices"][0]["message"]
    assert chat(server, messages=[*USER, message, *USER])["choices"][0]["message"]["content"] == ECHO


def test_empty_content_is_a_turn_without_words(server: RunningServer) -> None:
    content = chat(server, messages=[{"role": "user", "content": ""}])["choices"][0]["message"]["content"]
    assert content == "user\n"


def test_neutral_fields_are_accepted(server: RunningServer) -> None:
    body = chat(
        server,
        messages=USER,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        logprobs=False,
        modalities=["text"],
        parallel_tool_calls=True,
        prompt_cache_key="k",
        safety_identifier="s",
    )
    assert body["choices"][0]["message"]["content"] == ECHO


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hi", "messages"),
        ({}, "messages"),
        (["Hi"], "messages[0]"),
        ([[]], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": {}}], "messages[0].content"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([*USER, {"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[1].tool_calls[0].id"),
        ([*USER, {"role": "assistant", "content": "x", "tool_calls": {}}], "messages[1].tool_calls"),
        ([*USER, {"role": "assistant", "content": None}], "messages[1].content"),
        ([*USER, {"role": "assistant", "tool_calls": [CALL | {"type": "x"}]}], "messages[1].tool_calls[0].type"),
        ([*USER, {"role": "assistant", "tool_calls": [CALL | {"function": {}}]}],
         "messages[1].tool_calls[0].function.name"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "mood": "glad"}], "messages[0].mood"),
        ([{"role": "user", "content": "x", "name": 1}], "messages[0].name"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}], "messages[0].content[0].b"),
        ([{"role": "user", "content": "\ud83d"}], "messages[0].content"),
        ([{"role": "user\udc00", "content": "x"}], "messages[0].role"),
    ],
)  # fmt: skip
def test_wrong_messages_name_their_place(server: RunningServer, messages: object, param: str) -> None:
    response = server.post(URL, messages=messages)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "field",
    [
        {"reasoning_effort": "low"},
        {"audio": {}},
        {"functions": [{}]},
        {"modalities": ["audio"]},
        {"web_search_options": {}},
        {"prompt": "x"},
    ],
)
def test_unsupported_fields_are_refused_by_name(server: RunningServer, field: dict[str, object]) -> None:
    response = server.post(URL, messages=USER, **field)
    assert response.status_code == 400
    error = response.json()["error"]
    assert [error["param"]] == list(field)
    assert error["code"] in ("unsupported_value", "unsupported_parameter", "unknown_parameter")


def test_what_the_template_refuses_is_400(start) -> None:
    picky = byte_tokenizer("{{ raise_exception('roles must alternate') }}")
    response = start(tokenizer=picky).post(URL, messages=USER)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("chat_template_error", "messages")
    assert "roles must alternate" in error["message"]


def test_a_model_without_template_is_400_and_still_completes(start) -> None:
    server = start(tokenizer=byte_tokenizer(None))
    response = server.post(URL, messages=USER)
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]
    assert server.complete(prompt="ab", max_tokens=2)["choices"][0]["text"] == "ab"


def test_a_conversation_beyond_the_context_is_told(server: RunningServer) -> None:
    response = server.post(URL, messages=[{"role": "user", "content": "x" * 600}])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "context" in error["message"]

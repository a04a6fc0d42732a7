"""A character that is spelled by several tokens comes out as U+FFFD, in text or in tool arguments.

vllm-mlx #109 and #130, exo #1691, mlx-vlm #1076; llama.cpp #28926 for tool calls.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from server.running_server import RunningServer, stream_text
from server.scripted_engine import ScriptedEngine
from text.byte_tokenizer import byte_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = [
    "\U0001f680",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7",
    "e\u0301n\u0303", "漢字かな", "\U00020000\ufffd", "שָׁלוֹם", "a\u0000b", "line\u2028end\x85",
]  # fmt: skip
# Renders tools after the conversation, which the engine repeats up to its end token.
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)


@pytest.fixture(scope="module")
def server() -> Any:
    wrapped = TokenizerWrapper(
        byte_tokenizer(TEMPLATE),
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
        tool_parser=json_tools.parse_tool_call,
    )
    engine = ScriptedEngine(max_context=2048)
    engine.model = SimpleNamespace(**{**vars(engine.model), "tokenizer": wrapped})
    running = RunningServer(engine)
    yield running
    running.wait_idle()
    running.close()
    engine.stop()


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_hold_whole_characters_and_join_to_the_text(server: RunningServer, text: str) -> None:
    num_tokens = len(text.encode())
    fields = {"prompt": text, "max_tokens": num_tokens}
    assert server.complete(**fields)["choices"][0]["text"] == text
    events = server.events(COMPLETIONS, **fields)
    assert stream_text(events) == text
    for event in events[:-1]:
        assert "\ufffd" not in event["choices"][0]["text"] or "\ufffd" in text


def test_an_end_inside_a_character_is_flushed_once(server: RunningServer) -> None:
    for num_tokens in (1, 2, 3):
        events = server.events(COMPLETIONS, prompt="\U0001f680", max_tokens=num_tokens)
        assert stream_text(events) == "\ufffd"
        assert sum("\ufffd" in event["choices"][0]["text"] for event in events[:-1]) == 1


TOOLS = [{"type": "function", "function": {"name": "say", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("text", TEXTS)
def test_tool_arguments_hold_whole_characters(server: RunningServer, text: str) -> None:
    call = json.dumps({"name": "say", "arguments": {"text": text}}, ensure_ascii=False)
    content = f"so {text}: <tool_call>{call}</tool_call>"
    fields = {"messages": [{"role": "user", "content": content}], "tools": TOOLS}
    body = server.post(CHAT, **fields).json()
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == f"so {text}:"
    [made] = choice["message"]["tool_calls"]
    assert made["type"] == "function"
    assert made["id"].startswith("call_")
    assert made["function"]["name"] == "say"
    assert json.loads(made["function"]["arguments"]) == {"text": text}
    events = server.events(CHAT, **fields)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    assert [piece["index"] for piece in pieces] == [0] * len(pieces)
    assert pieces[0]["function"]["name"] == "say"
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {"text": text}
    assert "".join(delta.get("content") or "" for delta in deltas) == f"so {text}:"
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_tools_reach_the_template_and_their_calls_and_results_too(server: RunningServer) -> None:
    server.post(CHAT, messages=[{"role": "user", "content": "x"}], tools=TOOLS)
    rendered = byte_tokenizer().decode(server.engine.last_requests[-1].prompt_token_ids)
    assert '"name": "say"' in rendered
    server.post(CHAT, messages=[{"role": "user", "content": "x"}], tools=TOOLS, tool_choice="none")
    assert "say" not in byte_tokenizer().decode(server.engine.last_requests[-1].prompt_token_ids)


def test_a_single_call_ends_the_answer_if_one_is_all_it_may_make(server: RunningServer) -> None:
    call = '<tool_call>{"name": "say", "arguments": {}}</tool_call>'
    fields = {"messages": [{"role": "user", "content": call * 3}], "tools": TOOLS}
    three = server.post(CHAT, **fields).json()["choices"][0]
    assert [made["function"]["name"] for made in three["message"]["tool_calls"]] == ["say"] * 3
    assert len({made["id"] for made in three["message"]["tool_calls"]}) == 3
    one = server.post(CHAT, **fields, parallel_tool_calls=False).json()
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1
    assert one["choices"][0]["finish_reason"] == "tool_calls"
    assert one["usage"]["completion_tokens"] == 1 + len(call)

"""`usage` counts chunks instead of tokens, or differs between a stream and a whole answer (vLLM #8625)."""

from __future__ import annotations

from typing import Any

import pytest

from server.running_server import RunningServer
from server.scripted_engine import ScriptedEngine
from text.byte_tokenizer import byte_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CALL = '<tool_call>{"name": "f", "arguments": {"a": "\U0001f680"}}</tool_call>'
CASES: list[tuple[str, dict[str, Any], int]] = [
    # Every token is one byte, so the expected numbers can be counted by hand.
    (COMPLETIONS, {"prompt": "abcdef", "max_tokens": 4}, 4),
    (COMPLETIONS, {"prompt": "a\U0001f680", "max_tokens": 3}, 3),
    (COMPLETIONS, {"prompt": "abcdef", "max_tokens": 6, "stop": "cd"}, 4),
    (COMPLETIONS, {"prompt": "abcdef", "max_tokens": 0}, 0),
    (COMPLETIONS, {"prompt": ["abc", "xy"], "max_tokens": 2, "n": 3}, 12),
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}, 1 + len("user\nHi") + 1),
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 3}, 3),
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}, 1 + len("user\nHi") + 1),
    (CHAT, {"messages": [{"role": "user", "content": CALL}]}, 1 + len(("user\n" + CALL).encode()) + 1),
]


@pytest.fixture(scope="module")
def server() -> Any:
    running = RunningServer(ScriptedEngine())
    yield running
    running.wait_idle()
    running.close()
    running.engine.stop()


@pytest.mark.parametrize(("path", "fields", "num_tokens"), CASES)
def test_streamed_and_whole_usage_are_the_tokens(
    server: RunningServer, path: str, fields: dict[str, Any], num_tokens: int
) -> None:
    usage = server.post(path, **fields).json()["usage"]
    events = server.events(path, **fields, stream_options={"include_usage": True})
    assert events[-2]["usage"] == usage
    assert events[-2]["choices"] == []
    assert all(event["usage"] is None for event in events[:-2])
    assert usage["completion_tokens"] == num_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + num_tokens
    assert (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) <= usage["prompt_tokens"]
    if path == COMPLETIONS:
        prompts = fields["prompt"] if isinstance(fields["prompt"], list) else [fields["prompt"]]
        encoded = [byte_tokenizer().encode(prompt, add_special_tokens=True) for prompt in prompts]
        assert usage["prompt_tokens"] == sum(map(len, encoded))
    without = server.events(path, **fields)
    assert all("usage" not in event for event in without[:-1])


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}, None])
def test_stream_options_without_usage_end_the_stream_as_any_other(server: RunningServer, options: Any) -> None:
    """mlx-lm's server indexes the member and fails after the last chunk."""
    events = server.events(COMPLETIONS, prompt="ab", max_tokens=2, stream_options=options)
    assert events[-1] == "[DONE]"
    assert all("usage" not in event for event in events[:-1])

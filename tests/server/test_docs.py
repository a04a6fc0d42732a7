"""docs/server.md names every field, limit and metric that the server knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlxcel_paged.server import chat, completions, messages, schema
from mlxcel_paged.server.config import ServerConfig

from .running_server import RunningServer

DOCS = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


def section(heading: str) -> str:
    return DOCS.split(f"## {heading}\n")[1].split("\n## ")[0]


FIELDS = section("Fields") + section("Fields that are not supported")


def test_every_ignored_field_is_listed_and_nothing_else() -> None:
    [line] = re.findall(r"^Ignored, .*?:(.*?)\.$", DOCS, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", line)) == schema.IGNORED_FIELDS


@pytest.mark.parametrize("names", [completions.NEUTRAL_VALUES, chat.NEUTRAL_VALUES, messages.NEUTRAL_MESSAGE_VALUES])
def test_every_unsupported_field_is_listed(names: dict[str, object]) -> None:
    assert set(names) <= set(re.findall(r"`(\w+)`", FIELDS))


def test_every_field_that_a_request_may_have_is_listed() -> None:
    fields = {
        "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
        "stream", "stream_options", "include_usage", "ignore_eos", "prompt", "messages", "role", "content", "name", "n",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs",
        "response_format", "tools", "tool_choice", "parallel_tool_calls", "tool_calls", "tool_call_id", "best_of",
    }  # fmt: skip
    assert fields <= set(re.findall(r"`(\w+)`", FIELDS))


def test_the_limits_are_the_defaults() -> None:
    config = ServerConfig()
    assert f"{config.host}:{config.port}" in DOCS
    assert f"up to {config.max_stop_strings} strings" in DOCS
    assert f"{config.max_stop_characters} characters" in DOCS
    assert f"up to {config.max_prompts} prompts" in DOCS
    assert f"up to {config.max_messages} objects" in DOCS
    assert f"1 to {config.max_choices}" in DOCS
    assert f"at most {config.max_sequences} answers" in DOCS
    assert f"up to {config.max_tools} functions" in DOCS
    assert f"larger than {config.max_body_bytes >> 20} MiB" in DOCS
    assert f"{config.keepalive_interval_s:g} seconds" in DOCS
    assert f"up to {config.shutdown_timeout_s} seconds" in DOCS


def test_every_metric_is_listed(server: RunningServer) -> None:
    names = re.findall(
        r"^# TYPE mlxcel_paged_(\w+) (?:counter|gauge|histogram)$", server.client.get("/metrics").text, re.M
    )
    listed = set(re.findall(r"`(\w+)(?:\{\w+\})?`", section("Metrics")))
    assert {name for name in names if not name.endswith("_created")} <= listed

"""A field that may be null ends the request with a 500, or an empty prompt the engine.

vLLM #19862, ramalama #2465; vLLM #7632 and #7283 for empty prompts.
"""

from __future__ import annotations

from typing import Any

import pytest

from server.running_server import RunningServer
from server.scripted_engine import ScriptedEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COMMON = [
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream",
    "stream_options", "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "response_format", "ignore_eos", "user", "metadata", "store", "service_tier", "logprobs",
]  # fmt: skip
FIELDS = {
    COMPLETIONS: [*COMMON, "best_of", "echo", "suffix"],
    CHAT: [*COMMON, "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call",
           "modalities", "audio", "reasoning_effort", "verbosity", "web_search_options", "prediction"],
}  # fmt: skip
BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "ok", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "ok"}], "max_tokens": 2},
}
HOSTILE: list[Any] = [
    -1,
    0,
    1,
    2**63,
    -(10**40),
    1e308,
    0.5,
    "",
    "x",
    "\ud800",
    [],
    [None],
    [[]],
    {},
    {"a": None},
    True,
]
EMPTY: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": ""}), (COMPLETIONS, {"prompt": [""]}), (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": [[]]}), (COMPLETIONS, {"prompt": None}), (CHAT, {"messages": []}),
    (CHAT, {"messages": None}), (CHAT, {"messages": [{"role": "user"}]}), (CHAT, {"messages": [{}]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Any:
    running = RunningServer(ScriptedEngine())
    yield running
    running.wait_idle()
    running.close()
    running.engine.stop()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_null_is_the_default_for_every_field(server: RunningServer, path: str) -> None:
    expected = server.post(path, **BASE[path]).json()["choices"]
    for name in FIELDS[path]:
        fields = {**BASE[path], name: None}
        response = server.post(path, **fields)
        assert response.status_code == 200, (name, response.text)
        if name != "max_tokens":
            assert response.json()["choices"] == expected, name
    everything = {**dict.fromkeys(FIELDS[path]), **BASE[path]}
    assert server.post(path, **everything).json()["choices"] == expected


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_whatever_a_field_holds_the_answer_is_200_or_a_400_that_names_it(server: RunningServer, path: str) -> None:
    for name in FIELDS[path]:
        for value in HOSTILE:
            fields = {**BASE[path], name: value}
            response = server.post(path, **fields)
            if response.status_code == 200:
                continue
            error = response.json()["error"]
            assert response.status_code == (404 if error["code"] == "model_not_found" else 400), (name, value, error)
            assert error["param"].split(".")[0].split("[")[0] in (name, "n"), (name, value, error)


@pytest.mark.parametrize(("path", "fields"), EMPTY)
def test_an_empty_prompt_is_refused_and_its_neighbour_is_answered(
    server: RunningServer, path: str, fields: dict[str, Any]
) -> None:
    response = server.post(path, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(next(iter(fields)))
    assert server.post(path, **BASE[path]).status_code == 200


def test_an_empty_message_is_answered(server: RunningServer) -> None:
    assert server.post(CHAT, messages=[{"role": "user", "content": ""}]).status_code == 200


@pytest.mark.parametrize(("max_tokens", "num_tokens"), [(None, 16), (0, 0), (1, 1), (10**30, 510)])
def test_max_tokens_null_0_1_and_huge(server: RunningServer, max_tokens: int | None, num_tokens: int) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = server.complete(prompt="ab", **{name: max_tokens})
        assert body["usage"]["completion_tokens"] == num_tokens
        assert body["choices"][0]["finish_reason"] == "length"

"""Fields: every wrong type and range is a 400 that names the field, alone and in pairs."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest

from .running_server import RunningServer

WRONG: dict[str, list[Any]] = {
    "prompt": [
        "", [], [""], ["a", ""], [[]], [[1], []], [1, "a"], ["a", 1], [1, [2]], [True], [[True]], [1.0], 7, 1.5, True,
        {}, [None], [[None]], [-1], [10**6], [[0, 2**63]], [[10**30]], "\ud83d", ["ok", "\udc00"], ["a"] * 65,
    ],
    "max_tokens": [-1, 1.0, 1.5, True, "1", [], {}, -(10**30)],
    "max_completion_tokens": [-1, 0.5, False, "many"],
    "temperature": [-0.1, 2.1, True, "0", [0], 1e300, 10**400, -(10**400)],
    "top_p": [-0.1, 1.0001, True, "1", {}],
    "top_k": [-1, 1.5, True, "1"],
    "min_p": [-1, 2, False, "0"],
    "seed": [1.0, True, "1", 2**64, -(2**63) - 1, []],
    "stop": ["", [""], ["a", ""], [1], [None], 1, True, {}, "\ud800", ["x"] * 17, "x" * 1025, ["a", ["b"]]],
    "stream": [1, 0, "true", [], {}],
    "stream_options": [{"include_usage": True}, [], True, "x"],  # stream is false here
    "model": [1, True, [], "\ud800"],
    "ignore_eos": [1, "yes"],
    "n": [0, -1, True, 1.5, "1", [], 129, 10**30],
    "best_of": [2, 0, True],
    "echo": [True, 1, "no"],
    "logprobs": [-1, 21, True, False, "1", 0.5],
    "suffix": ["x", 1],
    "frequency_penalty": [2.1, -2.1, True, "0", 1e300],
    "presence_penalty": [-2.01, False, [1]],
    "repetition_penalty": [0, -1, 10.1, True, "1"],
    "logit_bias": [
        {"1": 101}, {"1": -100.5}, {"1": True}, {"1": "x"}, {"x": 1}, {"-1": 1}, {"01": 1}, {"1.0": 1}, {"": 1},
        {"99999": 1}, {"9" * 4000: 1}, {"\u0661": 1}, [], True, "1",
    ],
    "response_format": [
        "json_object", [], {}, {"type": 1}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_object", "x": 1},
        {"type": "json_schema", "json_schema": {}}, {"type": "json_schema", "json_schema": {"name": ""}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": []}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no such type"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": []}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "http://127.0.0.1:9/x"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x-guidance": {"lenient": True}}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": "\ud800"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"pattern": "(?=a)", "type": "string"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"description": "x" * 70000}}},
    ],
    "tools": [[]],
    "tool_choice": ["auto"],
    "no_such_field": [0, "", False, [], {}],
    "Prompt": ["x"],
    "\ud83d": [1],
}  # fmt: skip
CASES = [(name, value) for name, values in WRONG.items() for value in values]


def post(server: RunningServer, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    # json.dumps escapes surrogates to ASCII, which a client's own encoder may refuse to send.
    content = json.dumps({"prompt": "ok", "max_tokens": 1, **fields})
    response = server.client.post("/v1/completions", content=content)
    return response.status_code, response.json()


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda part: repr(part)[:30])
def test_a_wrong_value_is_a_400_that_names_the_field(server: RunningServer, name: str, value: Any) -> None:
    status, body = post(server, {name: value})
    assert status == 400, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == name or error["param"].startswith((f"{name}[", f"{name}."))
    assert error["code"]
    assert len(error["message"]) < 400


def test_two_wrong_fields_name_one_of_them(server: RunningServer) -> None:
    firsts = [(name, values[index]) for index in (0, -1) for name, values in WRONG.items()]
    for (left, left_value), (right, right_value) in combinations(firsts, 2):
        status, body = post(server, {left: left_value, right: right_value})
        assert status == 400, (left, right)
        assert re.split(r"[\[.]", body["error"]["param"])[0] in (left, right)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("temperature", 2), ("temperature", 1e-9), ("top_p", 0), ("top_p", 1), ("seed", 0),
     ("seed", 2**64 - 1), ("seed", -(2**63)), ("top_k", 10**9), ("min_p", 1), ("stop", ["x"] * 16), ("stop", []),
     ("stop", "y" * 1024), ("max_tokens", 0),
     ("max_tokens", 10**30), ("n", 128), ("logprobs", 0), ("logprobs", 20), ("frequency_penalty", -2),
     ("presence_penalty", 2), ("repetition_penalty", 1e-6), ("repetition_penalty", 10), ("logit_bias", {}),
     ("logit_bias", {"0": -100, "258": 100.0}), ("best_of", 1), ("response_format", {"type": "text"})],
)  # fmt: skip
def test_the_ends_of_ranges_are_in_them(server: RunningServer, name: str, value: Any) -> None:
    status, body = post(server, {name: value})
    assert status == 200, body


@pytest.mark.parametrize(
    "options",
    [{"include_usage": 1}, {"include_usage": "true"}, {"no_such_option": True}, {"include_usage": True, "x": 0}],
)
def test_wrong_stream_options_name_the_member(server: RunningServer, options: dict[str, Any]) -> None:
    status, body = post(server, {"stream": True, "stream_options": options})
    assert status == 400
    assert body["error"]["param"].startswith("stream_options.")


def test_the_two_names_of_max_tokens_must_agree(server: RunningServer) -> None:
    assert post(server, {"max_tokens": 2, "max_completion_tokens": 2})[0] == 200
    status, body = post(server, {"max_tokens": 2, "max_completion_tokens": 3})
    assert (status, body["error"]["param"]) == (400, "max_completion_tokens")


def test_a_refused_request_never_reaches_the_engine(server: RunningServer) -> None:
    before = server.engine.num_submitted
    for name, value in CASES:
        post(server, {name: value})
    assert server.engine.num_submitted == before

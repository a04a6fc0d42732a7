"""/v1/completions: every form of prompt, whole and streamed, with the same text and usage."""

from __future__ import annotations

import pytest

from text.byte_tokenizer import spell

from .running_server import RunningServer, stream_text


def tokens_of(server: RunningServer, text: str | bytes) -> list[int]:
    return spell(server.engine.tokenizer, text)


def test_the_whole_answer_has_openais_shape(server: RunningServer) -> None:
    body = server.complete(prompt="hello", max_tokens=5)
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "scripted/echo"
    assert isinstance(body["created"], int)
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}


def test_every_form_of_prompt(server: RunningServer) -> None:
    ids = tokens_of(server, "ab")
    for prompt, texts in [
        ("ab", ["ab"]),
        (["ab"], ["ab"]),
        (["ab", "cd", "ef"], ["ab", "cd", "ef"]),
        (ids, ["ab"]),
        ([ids], ["ab"]),
        ([ids, tokens_of(server, "cd")], ["ab", "cd"]),
    ]:
        body = server.complete(prompt=prompt, max_tokens=2)
        assert [choice["text"] for choice in body["choices"]] == texts
        assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
        assert body["usage"] == {
            "prompt_tokens": 2 * len(texts),
            "completion_tokens": 2 * len(texts),
            "total_tokens": 4 * len(texts),
        }


def test_the_end_of_sequence_token_ends_and_counts_and_has_no_text(server: RunningServer) -> None:
    prompt = [*tokens_of(server, "abc"), server.engine.tokenizer.eos_token_id]
    body = server.complete(prompt=prompt, max_tokens=50)
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 4
    assert server.complete(prompt=prompt, max_tokens=6, ignore_eos=True)["choices"][0]["text"] == "abcab"


@pytest.mark.parametrize("prompt", ["hello", ["a", "bc"], "naïve 😀 漢字"])
@pytest.mark.parametrize("stop", [None, "l", ["😀", "bc"]])
def test_a_stream_says_what_the_whole_answer_says(server: RunningServer, prompt: object, stop: object) -> None:
    fields = {"prompt": prompt, "max_tokens": 24, "stop": stop}
    whole = server.complete(**fields)
    events = server.events("/v1/completions", **fields, stream_options={"include_usage": True})
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events)
    assert {event["id"] for event in events} == {usage["id"]}
    for choice in whole["choices"]:
        assert stream_text(events, choice["index"]) == choice["text"]
        reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert reasons[-1] == choice["finish_reason"]
        assert set(reasons[:-1]) <= {None}


def test_a_stream_without_include_usage_has_none(server: RunningServer) -> None:
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        events = server.events("/v1/completions", prompt="ab", max_tokens=2, stream_options=options)
        assert events[-1] == "[DONE]"
        assert all("usage" not in event for event in events[:-1])
        assert len(events[-2]["choices"]) == 1


def test_default_max_tokens_is_openais(server: RunningServer) -> None:
    assert server.complete(prompt="x")["usage"]["completion_tokens"] == 16


def test_max_tokens_zero_and_one(server: RunningServer) -> None:
    for max_tokens in (0, 1):
        body = server.complete(prompt="xy", max_tokens=max_tokens)
        assert body["choices"][0]["text"] == "xy"[:max_tokens]
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == max_tokens
        assert stream_text(server.events("/v1/completions", prompt="xy", max_tokens=max_tokens)) == "xy"[:max_tokens]


@pytest.mark.parametrize("max_tokens", [505, 10**9, 10**40])
def test_max_tokens_beyond_the_context_is_clamped(server: RunningServer, max_tokens: int) -> None:
    body = server.complete(prompt="12345678", max_tokens=max_tokens)
    assert body["usage"] == {"prompt_tokens": 8, "completion_tokens": 504, "total_tokens": 512}
    assert body["choices"][0]["finish_reason"] == "length"


def test_sampling_fields_reach_the_engine_with_openais_defaults(server: RunningServer) -> None:
    server.complete(prompt="x", max_tokens=1)
    sampling = server.engine.last_requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (1, 1, 0, 0, None)
    server.complete(prompt="x", max_tokens=1, temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=-7)
    sampling = server.engine.last_requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0, 0.5, 3, 0.1, -7)
    server.complete(prompt="x", max_completion_tokens=1)
    assert server.engine.last_requests[-1].sampling.max_tokens == 1


def test_null_means_absent_for_every_field(server: RunningServer) -> None:
    names = [
        "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
        "stream", "stream_options", "n", "best_of", "echo", "logprobs", "suffix", "user", "metadata", "logit_bias",
        "frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos", "store", "no_such_field",
    ]  # fmt: skip
    body = server.complete(prompt="abc", **dict.fromkeys(names))
    assert body["usage"]["completion_tokens"] == 16


def test_ignored_and_neutral_fields_are_accepted(server: RunningServer) -> None:
    body = server.complete(
        prompt="abc",
        max_tokens=3,
        user="u",
        metadata={"a": "\ud800"},
        store=True,
        service_tier="auto",
        n=1,
        best_of=1,
        echo=False,
        suffix="",
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        repetition_penalty=1.0,
    )
    assert body["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("name", ["scripted/echo", "default", "embedded", None])
def test_the_names_of_the_model(server: RunningServer, name: str | None) -> None:
    assert server.complete(prompt="a", max_tokens=1, model=name)["model"] == "scripted/echo"


def test_a_wrong_model_name_is_404(server: RunningServer) -> None:
    response = server.post("/v1/completions", prompt="a", model="gpt-4")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "invalid_request_error")
    assert "gpt-4" in error["message"]
    assert "scripted/echo" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("excess", [0, 1, 512])
def test_a_prompt_beyond_the_context_is_told_before_any_header(
    server: RunningServer, stream: bool, excess: int
) -> None:
    response = server.post("/v1/completions", prompt="x" * (512 + excess), stream=stream)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    for word in ("context", "512", str(512 + excess)):
        assert word in error["message"]


def test_one_bad_prompt_of_several_refuses_all(server: RunningServer) -> None:
    response = server.post("/v1/completions", prompt=["ok", "x" * 600])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    server.wait_idle()


def test_a_special_token_as_stop_string_stops(server: RunningServer) -> None:
    prompt = [
        *tokens_of(server, "ab"),
        server.engine.tokenizer.convert_tokens_to_ids("<|turn|>"),
        *tokens_of(server, "c"),
    ]
    plain = server.complete(prompt=prompt, max_tokens=4)["choices"][0]
    assert (plain["text"], plain["finish_reason"]) == ("abc", "length")
    stopped = server.complete(prompt=prompt, max_tokens=4, stop=["<|turn|>", "zz"])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == ("ab", "stop")

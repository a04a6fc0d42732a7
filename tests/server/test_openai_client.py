"""The openai package, unchanged, against a running server with the embedded model; and curl."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from mlxcel_paged.server.config import ServerConfig

from .embedded import embedded_server
from .running_server import RunningServer

pytestmark = pytest.mark.model
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop_clock"}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with embedded_server() as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.host}:{server.port}/v1", api_key="unused", max_retries=0) as one:
        yield one
    server.wait_idle()


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="default", messages=QUESTION, temperature=0, max_tokens=12)
    [choice] = whole.choices
    assert choice.message.content == "The capital of France is Paris."
    assert (choice.message.role, choice.finish_reason, choice.message.tool_calls) == ("assistant", "stop", None)
    assert whole._request_id
    stream = client.chat.completions.create(
        model="default", messages=QUESTION, temperature=0, max_tokens=12, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == choice.message.content
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.total_tokens == whole.usage.total_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0  # the same prompt was there before
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_completions_with_logprobs(client: openai.OpenAI) -> None:
    [choice] = client.completions.create(
        model="default", prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=2
    ).choices
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert len(choice.logprobs.token_logprobs or []) == 4
    # Greedy: the sampled token is the most likely one, so there are two in all.
    assert [len(top) for top in choice.logprobs.top_logprobs or []] == [2] * 4
    offsets = choice.logprobs.text_offset or []
    for offset, token in zip(offsets, choice.logprobs.tokens or [], strict=True):
        assert choice.text[offset:].startswith(token)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(
        model="default", messages=QUESTION, temperature=0, max_tokens=3, logprobs=True, top_logprobs=5
    )
    [choice] = response.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert "".join(token.token for token in content) == choice.message.content
    for token in content:
        assert len(token.top_logprobs) == 5
        values = [top.logprob for top in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert token.logprob == token.top_logprobs[0].logprob <= 0


def test_n_and_seed(client: openai.OpenAI) -> None:
    def texts(n: int) -> list[str | None]:
        choices = client.chat.completions.create(
            model="default", messages=QUESTION, temperature=2, max_tokens=4, n=n, seed=5
        ).choices
        assert [choice.index for choice in choices] == list(range(n))
        return [choice.message.content for choice in choices]

    three = texts(3)
    assert len(set(three)) == 3
    assert texts(2) == three[:2]


def test_json_object_and_json_schema(client: openai.OpenAI) -> None:
    ask: Any = [{"role": "user", "content": "Describe Paris as JSON."}]
    schema: Any = {
        "type": "json_schema",
        "json_schema": {
            "name": "city",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {"name": {"enum": ["Paris", "Rome"]}, "visited": {"type": "boolean"}},
                "required": ["name", "visited"],
                "additionalProperties": False,
            },
        },
    }
    for temperature in (0, 2):
        [choice] = client.chat.completions.create(
            model="default", messages=ask, temperature=temperature, seed=1, max_tokens=60, response_format=schema
        ).choices
        assert choice.finish_reason == "stop"
        city = json.loads(choice.message.content or "")
        assert set(city) == {"name", "visited"}
        assert city["name"] in ("Paris", "Rome")
        assert isinstance(city["visited"], bool)
    [choice] = client.chat.completions.create(
        model="default", messages=ask, temperature=0, max_tokens=10, response_format={"type": "json_object"}
    ).choices
    assert (choice.message.content or "").startswith("{")


@pytest.mark.parametrize(("choice", "names"), [("required", {"get_weather", "stop_clock"}), (NAMED, {"get_weather"})])
def test_forced_tool_calls_whole_and_streamed(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    ask: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    settings: Any = {
        "model": "default", "messages": ask, "tools": TOOLS, "tool_choice": choice, "temperature": 0,
        "parallel_tool_calls": False, "max_tokens": 80,
    }  # fmt: skip
    [answer] = client.chat.completions.create(**settings).choices
    assert answer.message.content is None
    [call] = answer.message.tool_calls or []
    assert (answer.finish_reason, call.type) == ("tool_calls", "function")
    assert call.function.name in names
    if call.function.name == "get_weather":
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    name, arguments, call_ids, reasons = "", "", [], []
    for chunk in client.chat.completions.create(**settings, stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        assert not chunk.choices[0].delta.content
        pieces = chunk.choices[0].delta.tool_calls or []
        assert len(pieces) <= 1
        for piece in pieces:
            assert piece.index == 0
            assert piece.function is not None
            call_ids += [piece.id] if piece.id else []
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert len(call_ids) == 1
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    # The turn goes on with the result.
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain"}
    history: Any = [*ask, answer.message.model_dump(exclude_none=True), result]
    [last] = client.chat.completions.create(model="default", messages=history, temperature=0, max_tokens=3).choices
    assert last.message.content


def test_auto_is_refused_by_a_model_that_knows_no_tools(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=QUESTION, tools=TOOLS)
    assert caught.value.param == "tools"
    assert "knows no tools" in caught.value.message


def test_errors_are_the_clients_own_classes(client: openai.OpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-none", messages=QUESTION)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="default", messages=QUESTION, temperature=3)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    assert wrong.value.request_id


def test_keys_with_the_client(start: Any) -> None:
    locked = start(ServerConfig(api_keys=("right",)))
    base_url = f"http://{locked.host}:{locked.port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=base_url, api_key="right", max_retries=0) as client:
        response = client.chat.completions.with_raw_response.create(
            model="default", messages=[{"role": "user", "content": "x"}], extra_headers={"x-request-id": "mine-1"}
        )
        assert response.headers["x-request-id"] == "mine-1"


def test_a_full_queue_is_a_rate_limit_that_the_client_retries(start: Any) -> None:
    busy = start(parallel=1, max_waiting=1)
    busy.engine.hold()
    with openai.OpenAI(base_url=f"http://{busy.host}:{busy.port}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="default", prompt="a", max_tokens=1, n=2)
        assert caught.value.response.headers["retry-after"]
        busy.engine.go_on()
        patient = client.with_options(max_retries=3)
        assert patient.completions.create(model="default", prompt="a", max_tokens=1).choices[0].text == "a"


def test_the_asynchronous_client_and_a_stream_left_early(start: Any) -> None:
    server = start(step_s=0.005)

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"http://{server.host}:{server.port}/v1", api_key="x", max_retries=0
        ) as client:

            async def one(text: str) -> str:
                stream = await client.chat.completions.create(
                    model="default", messages=[{"role": "user", "content": text}], stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            async with await client.completions.create(
                model="default", prompt="ab", max_tokens=400, stream=True
            ) as abandoned:
                async for _ in abandoned:
                    break
            return list(await asyncio.gather(*(one(f"number {number}") for number in range(6))))

    assert asyncio.run(run()) == [f"user\nnumber {number}" for number in range(6)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(start: Any) -> None:
    server = start()
    url = f"http://{server.host}:{server.port}"

    def curl(*arguments: str) -> str:
        command = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "30", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    body = {"messages": [{"role": "user", "content": "Grüße \U0001f680"}], "logprobs": True, "n": 2}
    answer = json.loads(curl(f"{url}/v1/chat/completions", "-d", json.dumps(body)))
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["user\nGrüße \U0001f680"] * 2
    lines = curl("-N", f"{url}/v1/completions", "-d", '{"prompt": "abc", "max_tokens": 3, "stream": true}').split(
        "\n\n"
    )
    assert lines[-2:] == ["data: [DONE]", ""]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2]) == "abc"
    assert "HTTP/1.1 400" in curl("--include", f"{url}/v1/completions", "-d", "{}")
    assert json.loads(curl(f"{url}/health")) == {"status": "ok"}


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    inhabitants: int
    sights: list[Literal["river", "hill"]] = pydantic.Field(max_length=1)


def test_the_clients_parse_and_stream_helpers(client: openai.OpenAI) -> None:
    ask: Any = [{"role": "user", "content": "Describe Paris as JSON."}]
    settings: Any = {"model": "default", "messages": ask, "temperature": 1.5, "seed": 2, "max_tokens": 100}
    [choice] = client.chat.completions.parse(**settings, response_format=City).choices
    assert isinstance(choice.message.parsed, City)
    with client.chat.completions.stream(**settings, response_format=City) as stream:
        kinds = {event.type for event in stream}
        [streamed] = stream.get_final_completion().choices
    assert streamed.message.parsed == choice.message.parsed
    assert {"chunk", "content.delta", "content.done"} <= kinds
    # That helper wants strict tools, as pydantic_function_tool makes them.
    tool = openai.pydantic_function_tool(City, name="note_city")
    with client.chat.completions.stream(
        **settings, tools=[tool], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        kinds = {event.type for event in stream}
        [called] = stream.get_final_completion().choices
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    [call] = called.message.tool_calls or []
    assert call.function.name == "note_city"
    assert isinstance(call.function.parsed_arguments, City)

"""What the generating endpoints do alike: read, check, tokenize, run, and answer whole or as a stream."""

from __future__ import annotations

import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from mlxcel_paged.random_stream import choice_seed
from mlxcel_paged.request import InvalidRequestError, SamplingParams
from mlxcel_paged.server.answer import AnswerFormat, AnswerHead, gather
from mlxcel_paged.server.body import read_json_object
from mlxcel_paged.server.disconnect import ClientGoneError, until_disconnect
from mlxcel_paged.server.errors import ApiError, bad_request, internal_error
from mlxcel_paged.server.fields import Fields
from mlxcel_paged.server.generation import Delta, Generation
from mlxcel_paged.server.limits import Arrival
from mlxcel_paged.server.model_text import ModelText
from mlxcel_paged.server.prepared import Prepared
from mlxcel_paged.server.schema import GenerationFields, read_generation
from mlxcel_paged.server.service import Service
from mlxcel_paged.server.sse import EventStream
from mlxcel_paged.text.errors import TextError
from mlxcel_paged.text.json_grammar import GrammarSyntaxError

logger = logging.getLogger("mlxcel_paged.server")

PromptT = TypeVar("PromptT")


class GenerateEndpoint(ABC, Generic[PromptT]):
    """An ASGI endpoint. Subclasses say how a prompt is read and encoded and what an answer looks like."""

    id_prefix: str
    answer_format: type[AnswerFormat]
    default_max_tokens: int | None
    prompt_param: str

    def __init__(self, service: Service) -> None:
        self._service = service

    @abstractmethod
    def read_prompt(self, fields: Fields, shared: GenerationFields) -> PromptT:
        """Takes the prompt and the endpoint's own fields out of a request; 400 for what is wrong with them."""

    @abstractmethod
    def read_num_logprobs(self, fields: Fields) -> int | None:
        """Takes out how many likely tokens are to be reported per token; None reports nothing."""

    @abstractmethod
    def num_prompts(self, prompt: PromptT) -> int:
        """How many prompts there are."""

    @abstractmethod
    def prepare(self, text: ModelText, prompt: PromptT) -> Prepared:
        """Encodes prompts and compiles grammars; runs in the text thread. TextError or ApiError for what is wrong."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        read_at: float | None = None
        arrival: Arrival | None = None
        try:
            members = await read_json_object(request, self._service.config.max_body_bytes)
            read_at = time.monotonic()
            arrival = self._service.arrivals.enter()
            await until_disconnect(receive, self._answer(members, arrival, send))
        except (ClientDisconnect, ClientGoneError):
            scope["state"]["client_gone"] = True
        except ApiError as error:
            self._service.metrics.rejected(error.code, None if read_at is None else time.monotonic() - read_at)
            raise
        finally:
            if arrival is not None:
                arrival.leave()

    async def _answer(self, members: dict[str, object], arrival: Arrival, send: Send) -> None:
        arrival_time = time.monotonic()
        service = self._service
        text = service.text()
        fields = Fields(members)
        shared = read_generation(fields, service.config)
        num_logprobs = self.read_num_logprobs(fields)
        prompt = self.read_prompt(fields, shared)
        fields.finish()
        text.require_name(shared.model)
        num_sequences = self.num_prompts(prompt) * shared.num_choices
        if num_sequences > service.config.max_sequences:
            message = f"{num_sequences} answers are asked for, at most {service.config.max_sequences} are allowed"
            raise bad_request("n", message)
        # Counted before anything costly is done for the request.
        with service.open_sequences.holding(num_sequences):
            arrival.grow(num_sequences)
            prepared = await self._prepared(text, shared, prompt)
            samplings = self._samplings(text, shared, prepared, num_logprobs)
            call_id = f"{self.id_prefix}{uuid.uuid4().hex}"
            stops, _ = text.split_stops(shared.stops)
            answer = self.answer_format(
                AnswerHead(
                    call_id, int(time.time()), text.name, shared.include_usage, num_logprobs, prepared.has_content
                )
            )
            arrival.leave()
            with Generation(
                service,
                call_id,
                prepared.prompts,
                samplings,
                stops,
                prepared.new_tool_calls,
                arrival_time,
                self.prompt_param,
            ) as generation:
                if shared.stream:
                    await self._stream(generation, answer, num_sequences, shared.include_usage, send)
                else:
                    await self._whole(generation, answer, num_sequences, send)

    async def _prepared(self, text: ModelText, shared: GenerationFields, prompt: PromptT) -> Prepared:
        json_format = shared.json_format

        def work() -> Prepared:
            prepared = self.prepare(text, prompt)
            if json_format is None:
                return prepared
            return replace(prepared, grammar=text.grammars.from_json_schema(json_format.schema))

        try:
            return await self._service.in_text_thread(work)
        except GrammarSyntaxError as error:
            param = "tools" if json_format is None else json_format.param
            raise bad_request(param, str(error), error.slug) from error
        except TextError as error:
            raise bad_request(self.prompt_param, str(error), error.slug) from error

    def _samplings(
        self, text: ModelText, shared: GenerationFields, prepared: Prepared, num_logprobs: int | None
    ) -> list[SamplingParams]:
        """How each of the answers to one prompt is sampled: with a seed, each from a stream of its own."""
        _, stop_token_ids = text.split_stops(shared.stops)
        try:
            sampling = shared.sampling(
                max_tokens=self.default_max_tokens if shared.max_tokens is None else shared.max_tokens,
                stop_token_ids=stop_token_ids,
                num_logprobs=num_logprobs,
                grammar=prepared.grammar,
            )
        except InvalidRequestError as error:
            raise bad_request(error.param, str(error)) from error
        seed = sampling.seed
        if seed is None:
            return [sampling] * shared.num_choices
        return [replace(sampling, seed=choice_seed(seed, choice)) for choice in range(shared.num_choices)]

    async def _whole(self, generation: Generation, answer: AnswerFormat, num_sequences: int, send: Send) -> None:
        deltas: list[list[Delta]] = [[] for _ in range(num_sequences)]
        while not generation.is_done:
            delta = await generation.next_delta(self._service.config.keepalive_interval_s)
            if delta is not None:
                deltas[delta.index].append(delta)
        await send_json(send, answer.whole([gather(each) for each in deltas], generation.usage))

    async def _stream(
        self, generation: Generation, answer: AnswerFormat, num_sequences: int, include_usage: bool, send: Send
    ) -> None:
        stream = EventStream(send)
        try:
            while not generation.is_done:
                delta = await generation.next_delta(self._service.config.keepalive_interval_s)
                if not stream.is_started:
                    for chunk in answer.opening_chunks(num_sequences):
                        await stream.event(chunk)
                if delta is None:
                    await stream.comment("keepalive")
                    continue
                for chunk in answer.chunks(delta):
                    await stream.event(chunk)
        except Exception as error:
            if not stream.is_started:
                raise
            if not isinstance(error, ApiError):
                logger.exception("a stream failed")
                error = internal_error()
            self._service.metrics.rejected(error.code)
            await stream.error(error)
            return
        if include_usage:
            await stream.event(answer.usage_chunk(generation.usage))
        await stream.done()


async def send_json(send: Send, body: dict[str, object]) -> None:
    """Sends a whole 200 answer."""
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})

"""What the generating endpoints do alike: read, check, tokenize, run, and answer whole or as a stream."""

from __future__ import annotations

import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from mlxcel_paged.server.answer import AnswerFormat
from mlxcel_paged.server.body import read_json_object
from mlxcel_paged.server.disconnect import ClientGoneError, until_disconnect
from mlxcel_paged.server.errors import ApiError, bad_request, internal_error
from mlxcel_paged.server.fields import Fields
from mlxcel_paged.server.generation import Generation
from mlxcel_paged.server.model_text import ModelText
from mlxcel_paged.server.schema import GenerationFields, read_generation
from mlxcel_paged.server.service import Service
from mlxcel_paged.server.sse import EventStream
from mlxcel_paged.text.errors import TextError
from mlxcel_paged.text.prompt import PromptEncoder

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
    def read_prompt(self, fields: Fields) -> PromptT:
        """Takes the prompt and the endpoint's own fields out of a request; 400 for what is wrong with them."""

    @abstractmethod
    def num_sequences(self, prompt: PromptT) -> int:
        """How many sequences a prompt asks for."""

    @abstractmethod
    def encode(self, encoder: PromptEncoder, prompt: PromptT) -> list[list[int]]:
        """Token ids of each prompt; runs in the text thread. TextError for what cannot be encoded."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        read_at: float | None = None
        try:
            members = await read_json_object(request, self._service.config.max_body_bytes)
            read_at = time.monotonic()
            await until_disconnect(receive, self._answer(members, send))
        except (ClientDisconnect, ClientGoneError):
            scope["state"]["client_gone"] = True
        except ApiError as error:
            self._service.metrics.rejected(error.code, None if read_at is None else time.monotonic() - read_at)
            raise

    async def _answer(self, members: dict[str, object], send: Send) -> None:
        arrival_time = time.monotonic()
        service = self._service
        text = service.text()
        fields = Fields(members)
        generation_fields = read_generation(fields, service.config)
        prompt = self.read_prompt(fields)
        fields.finish()
        text.require_name(generation_fields.model)
        # Counted before anything costly is done for the request.
        num_sequences = self.num_sequences(prompt)
        with service.open_sequences.holding(num_sequences):
            with service.encoding.holding(num_sequences):
                prompts = await self._encoded(text, prompt)
            await self._generate(text, generation_fields, prompts, arrival_time, send)

    async def _encoded(self, text: ModelText, prompt: PromptT) -> list[list[int]]:
        try:
            return await self._service.in_text_thread(lambda: self.encode(text.encoder, prompt))
        except TextError as error:
            raise bad_request(self.prompt_param, str(error), error.slug) from error

    async def _generate(
        self, text: ModelText, fields: GenerationFields, prompts: list[list[int]], arrival_time: float, send: Send
    ) -> None:
        stops, stop_token_ids = text.split_stops(fields.stops)
        max_tokens = self.default_max_tokens if fields.max_tokens is None else fields.max_tokens
        sampling = fields.sampling(max_tokens, stop_token_ids)
        call_id = f"{self.id_prefix}{uuid.uuid4().hex}"
        answer = self.answer_format(call_id, int(time.time()), text.name, fields.include_usage)
        with Generation(
            self._service, call_id, prompts, sampling, stops, arrival_time, self.prompt_param
        ) as generation:
            if fields.stream:
                await self._stream(generation, answer, len(prompts), fields.include_usage, send)
            else:
                await self._whole(generation, answer, len(prompts), send)

    async def _whole(self, generation: Generation, answer: AnswerFormat, num_sequences: int, send: Send) -> None:
        texts: list[list[str]] = [[] for _ in range(num_sequences)]
        finish_reasons = [""] * num_sequences
        while not generation.is_done:
            delta = await generation.next_delta(self._service.config.keepalive_interval_s)
            if delta is None:
                continue
            texts[delta.index].append(delta.text)
            finish_reasons[delta.index] = delta.finish_reason or ""
        body = answer.whole(["".join(pieces) for pieces in texts], finish_reasons, generation.usage)
        await send_json(send, body)

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

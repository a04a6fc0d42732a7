"""POST /v1/chat/completions: a conversation, continued by the assistant's next turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxcel_paged.server.answer import AnswerFormat
from mlxcel_paged.server.endpoint import GenerateEndpoint
from mlxcel_paged.server.errors import bad_request
from mlxcel_paged.server.fields import Fields, checked_string, wrong_type
from mlxcel_paged.server.generation import Delta, Usage
from mlxcel_paged.text.prompt import PromptEncoder

_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_NEUTRAL_MESSAGE_VALUES: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_calls": ([],),
}
# `developer` is OpenAI's newer word for `system`; templates know the older one.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as chat templates take them: `role`, `content` and perhaps `name`."""

    messages: list[dict[str, str]]


class ChatFormat(AnswerFormat):
    """`chat.completion` objects, and `chat.completion.chunk` for streams."""

    def opening_chunks(self, num_sequences: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([_chunk_choice(index, delta, None)]) for index in range(num_sequences)]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.text:
            chunks.append(self._chunk([_chunk_choice(delta.index, {"content": delta.text}, None)]))
        if delta.finish_reason is not None:
            chunks.append(self._chunk([_chunk_choice(delta.index, {}, delta.finish_reason)]))
        return chunks

    def whole(self, texts: Sequence[str], finish_reasons: Sequence[str], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": finish_reason,
            }
            for index, (text, finish_reason) in enumerate(zip(texts, finish_reasons, strict=True))
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage.body()}

    def _chunk_object(self) -> str:
        return "chat.completion.chunk"


class ChatCompletions(GenerateEndpoint[Conversation]):
    """The endpoint."""

    id_prefix = "chatcmpl-"
    answer_format = ChatFormat
    default_max_tokens = None
    prompt_param = "messages"

    def read_prompt(self, fields: Fields) -> Conversation:
        fields.only_neutral(_NEUTRAL_VALUES)
        messages = fields.required("messages")
        if not isinstance(messages, list):
            raise wrong_type("messages", "an array", messages)
        if not messages:
            raise bad_request("messages", "messages is an empty array")
        maximum = self._service.config.max_messages
        if len(messages) > maximum:
            raise bad_request("messages", f"messages has {len(messages)} messages, at most {maximum} are allowed")
        return Conversation([_message(f"messages[{index}]", message) for index, message in enumerate(messages)])

    def num_sequences(self, prompt: Conversation) -> int:
        return 1

    def encode(self, encoder: PromptEncoder, prompt: Conversation) -> list[list[int]]:
        return [encoder.from_messages(prompt.messages)]


def _message(param: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    fields = Fields(value, param)
    role = checked_string(fields.param("role"), fields.required("role"))
    if role not in _ROLES:
        known = ", ".join(_ROLES)
        message = f"{fields.param('role')} must be one of {known}, got {role[:40]!r}"
        raise bad_request(fields.param("role"), message)
    fields.only_neutral(_NEUTRAL_MESSAGE_VALUES)
    rendered = {"role": _ROLES[role], "content": _content(fields.param("content"), fields.required("content"))}
    name = fields.string("name")
    if name is not None:
        rendered["name"] = name
    fields.finish()
    return rendered


def _content(param: str, value: object) -> str:
    """The text of a message, whose parts follow each other without anything in between."""
    if isinstance(value, str):
        return checked_string(param, value)
    if not isinstance(value, list):
        raise wrong_type(param, "a string or an array of text parts", value)
    return "".join(_part(f"{param}[{index}]", part) for index, part in enumerate(value))


def _part(param: str, value: object) -> str:
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)
    fields = Fields(value, param)
    kind = checked_string(fields.param("type"), fields.required("type"))
    if kind != "text":
        message = f"{fields.param('type')} must be text, got {kind[:40]!r}"
        raise bad_request(fields.param("type"), message, "unsupported_value")
    text = checked_string(fields.param("text"), fields.required("text"))
    fields.finish()
    return text


def _chunk_choice(index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

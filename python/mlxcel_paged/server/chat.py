"""POST /v1/chat/completions: a conversation, continued by the assistant's next turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxcel_paged.request import MAX_LOGPROBS
from mlxcel_paged.server.answer import AnswerFormat, Choice
from mlxcel_paged.server.endpoint import GenerateEndpoint
from mlxcel_paged.server.errors import bad_request
from mlxcel_paged.server.fields import Fields
from mlxcel_paged.server.generation import Delta, Usage
from mlxcel_paged.server.logprobs import chat_logprobs
from mlxcel_paged.server.messages import read_messages
from mlxcel_paged.server.model_text import ModelText
from mlxcel_paged.server.prepared import Prepared
from mlxcel_paged.server.schema import GenerationFields
from mlxcel_paged.server.tools import Tools, read_tools
from mlxcel_paged.text.token_spelling import TokenReport
from mlxcel_paged.text.tool_calls import GrammarToolCalls, NativeToolCalls
from mlxcel_paged.text.tool_prompt import in_words

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as chat templates take them, and the functions that may be called; None is none."""

    messages: list[dict[str, Any]]
    tools: Tools | None


class ChatFormat(AnswerFormat):
    """`chat.completion` objects, and `chat.completion.chunk` for streams."""

    def opening_chunks(self, num_sequences: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": "" if self._head.has_content else None}
        return [self._chunk([self._choice(index, delta)]) for index in range(num_sequences)]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        if delta.text:
            parts.append({"content": delta.text})
        if delta.calls:
            parts.append({"tool_calls": _call_deltas(delta)})
        if not parts and delta.reports and delta.finish_reason is None:
            parts.append({"content": ""})
        choices = [self._choice(delta.index, part) for part in parts]
        if delta.finish_reason is not None:
            choices.append(self._choice(delta.index, {}, delta.finish_reason))
        if delta.reports:
            choices[0]["logprobs"] = self._logprobs(delta.reports)
        return [self._chunk([choice]) for choice in choices]

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        bodies = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": self._logprobs(choice.reports),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._members("chat.completion"), "choices": bodies, "usage": usage.body()}

    def _choice(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _logprobs(self, reports: Sequence[TokenReport]) -> dict[str, Any] | None:
        return None if self._head.num_logprobs is None else chat_logprobs(reports)

    def _chunk_object(self) -> str:
        return "chat.completion.chunk"


class ChatCompletions(GenerateEndpoint[Conversation]):
    """The endpoint."""

    id_prefix = "chatcmpl-"
    answer_format = ChatFormat
    default_max_tokens = None
    prompt_param = "messages"

    def read_prompt(self, fields: Fields, shared: GenerationFields) -> Conversation:
        fields.only_neutral(NEUTRAL_VALUES)
        config = self._service.config
        tools = read_tools(fields, config.max_tools)
        if tools is not None and shared.json_format is not None:
            raise bad_request("response_format", "response_format cannot be JSON while tools may be called")
        return Conversation(read_messages(fields, config.max_messages), tools)

    def read_num_logprobs(self, fields: Fields) -> int | None:
        is_asked = fields.boolean("logprobs") or False
        num_top = fields.integer("top_logprobs", minimum=0, maximum=MAX_LOGPROBS)
        if not is_asked:
            if num_top:
                raise bad_request("top_logprobs", "top_logprobs is only allowed when logprobs is true")
            return None
        return num_top or 0

    def num_prompts(self, prompt: Conversation) -> int:
        return 1

    def prepare(self, text: ModelText, prompt: Conversation) -> Prepared:
        tools = prompt.tools
        if not text.knows_tools:
            if tools is not None and not tools.forced:
                raise bad_request(
                    "tools",
                    "this model's chat template knows no tools; calls can be forced: tool_choice required or a "
                    "function's name",
                    "unsupported_value",
                )
            messages = in_words(prompt.messages, tools.offered if tools else ())
            prompts = [text.encoder.from_messages(messages)]
        else:
            prompts = [text.encoder.from_messages(prompt.messages, tools.offered if tools else ())]
        if tools is None:
            return Prepared(prompts)
        if tools.forced:
            grammar = text.grammars.from_tool_calls(tools.forced_schemas(), several=tools.parallel)
            return Prepared(prompts, grammar, GrammarToolCalls, has_content=False)
        native = text.native_tool_calls
        if native is None:
            message = "how this model writes tool calls is not known; tool_choice required or a function's name works"
            raise bad_request("tools", message, "unsupported_value")
        max_calls = None if tools.parallel else 1
        return Prepared(prompts, None, lambda: NativeToolCalls(native, tools.offered, max_calls))


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return message


def _call_deltas(delta: Delta) -> list[dict[str, Any]]:
    """OpenAI's `delta.tool_calls`: one entry per call, however many pieces of it have come at once."""
    bodies: list[dict[str, Any]] = []
    for call in delta.calls:
        if bodies and bodies[-1]["index"] == call.index:
            bodies[-1]["function"]["arguments"] += call.arguments
            continue
        body: dict[str, Any] = {"index": call.index, "function": {"arguments": call.arguments}}
        if call.call_id is not None:
            body |= {"id": call.call_id, "type": "function"}
            body["function"]["name"] = call.name
        bodies.append(body)
    return bodies

"""POST /v1/completions: prompts as text or token ids, continued as they are."""

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
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
}
_EXPECTED = "a string, an array of strings, an array of token ids or an array of such arrays"


@dataclass(frozen=True, slots=True)
class CompletionPrompts:
    """The prompts of one request, in order."""

    prompts: list[str | list[int]]


class CompletionFormat(AnswerFormat):
    """`text_completion` objects; a stream has the same object in every chunk."""

    def opening_chunks(self, num_sequences: int) -> list[dict[str, Any]]:
        return []

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        return [self._chunk([_choice(delta.index, delta.text, delta.finish_reason)])]

    def whole(self, texts: Sequence[str], finish_reasons: Sequence[str], usage: Usage) -> dict[str, Any]:
        choices = [
            _choice(index, text, reason) for index, (text, reason) in enumerate(zip(texts, finish_reasons, strict=True))
        ]
        return {**self._head("text_completion"), "choices": choices, "usage": usage.body()}

    def _chunk_object(self) -> str:
        return "text_completion"


class Completions(GenerateEndpoint[CompletionPrompts]):
    """The endpoint."""

    id_prefix = "cmpl-"
    answer_format = CompletionFormat
    default_max_tokens = 16
    prompt_param = "prompt"

    def read_prompt(self, fields: Fields) -> CompletionPrompts:
        fields.only_neutral(_NEUTRAL_VALUES)
        value = fields.required("prompt")
        if isinstance(value, str):
            return CompletionPrompts([_text("prompt", value)])
        if not isinstance(value, list):
            raise wrong_type("prompt", _EXPECTED, value)
        if not value:
            raise bad_request("prompt", "prompt is an empty array")
        if _is_token_ids(value):
            return CompletionPrompts([value])
        maximum = self._service.config.max_prompts
        if len(value) > maximum:
            raise bad_request("prompt", f"prompt has {len(value)} prompts, at most {maximum} are allowed")
        # All of one kind: a list that mixes text and token ids is more likely a mistake than a wish.
        if all(isinstance(item, str) for item in value):
            return CompletionPrompts([_text(f"prompt[{index}]", item) for index, item in enumerate(value)])
        if all(isinstance(item, list) for item in value):
            return CompletionPrompts([_token_ids(f"prompt[{index}]", item) for index, item in enumerate(value)])
        raise bad_request("prompt", f"prompt must be {_EXPECTED}, all of one kind", "invalid_type")

    def num_sequences(self, prompt: CompletionPrompts) -> int:
        return len(prompt.prompts)

    def encode(self, encoder: PromptEncoder, prompt: CompletionPrompts) -> list[list[int]]:
        return [
            encoder.from_text(item) if isinstance(item, str) else encoder.from_token_ids(item)
            for item in prompt.prompts
        ]


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _text(param: str, value: object) -> str:
    text = checked_string(param, value)
    if not text:
        raise bad_request(param, f"{param} is an empty string")
    return text


def _token_ids(param: str, value: list[Any]) -> list[int]:
    if not value:
        raise bad_request(param, f"{param} is an empty array")
    if not _is_token_ids(value):
        raise bad_request(param, f"{param} must hold integer token ids and nothing else", "invalid_type")
    return value


def _is_token_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)

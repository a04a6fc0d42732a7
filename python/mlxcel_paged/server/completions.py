"""POST /v1/completions: prompts as text or token ids, continued as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxcel_paged.request import MAX_LOGPROBS
from mlxcel_paged.server.answer import AnswerFormat, Choice
from mlxcel_paged.server.endpoint import GenerateEndpoint
from mlxcel_paged.server.errors import bad_request
from mlxcel_paged.server.fields import Fields, checked_string, wrong_type
from mlxcel_paged.server.generation import Delta, Usage
from mlxcel_paged.server.logprobs import completion_logprobs
from mlxcel_paged.server.model_text import ModelText
from mlxcel_paged.server.prepared import Prepared
from mlxcel_paged.server.schema import GenerationFields
from mlxcel_paged.text.token_spelling import TokenReport

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {"echo": (False,), "suffix": ("",)}
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
        return [self._chunk([self._choice(delta.index, delta.text, delta.finish_reason, delta.reports)])]

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        bodies = [
            self._choice(index, choice.text, choice.finish_reason, choice.reports)
            for index, choice in enumerate(choices)
        ]
        return {**self._members("text_completion"), "choices": bodies, "usage": usage.body()}

    def _choice(
        self, index: int, text: str, finish_reason: str | None, reports: Sequence[TokenReport]
    ) -> dict[str, Any]:
        num_logprobs = self._head.num_logprobs
        logprobs = None if num_logprobs is None else completion_logprobs(reports, with_top=num_logprobs > 0)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _chunk_object(self) -> str:
        return "text_completion"


class Completions(GenerateEndpoint[CompletionPrompts]):
    """The endpoint."""

    id_prefix = "cmpl-"
    answer_format = CompletionFormat
    default_max_tokens = 16
    prompt_param = "prompt"

    def read_prompt(self, fields: Fields, shared: GenerationFields) -> CompletionPrompts:
        # Of best_of answers the n best are returned: if it is n, all of them.
        fields.only_neutral({**NEUTRAL_VALUES, "best_of": (shared.num_choices,)})
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

    def read_num_logprobs(self, fields: Fields) -> int | None:
        return fields.integer("logprobs", minimum=0, maximum=MAX_LOGPROBS)

    def num_prompts(self, prompt: CompletionPrompts) -> int:
        return len(prompt.prompts)

    def prepare(self, text: ModelText, prompt: CompletionPrompts) -> Prepared:
        encoder = text.encoder
        return Prepared(
            [
                encoder.from_text(item) if isinstance(item, str) else encoder.from_token_ids(item)
                for item in prompt.prompts
            ]
        )


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

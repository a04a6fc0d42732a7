"""The shape of an answer, whole or in chunks; each generating endpoint has its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxcel_paged.server.generation import Delta, Usage
from mlxcel_paged.text.token_spelling import TokenReport


@dataclass(slots=True)
class ToolCall:
    """A whole call."""

    call_id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Choice:
    """One answer, put together from its deltas."""

    text: str = ""
    finish_reason: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    reports: list[TokenReport] = field(default_factory=list)


def gather(deltas: Sequence[Delta]) -> Choice:
    """Puts the deltas of one sequence together."""
    choice = Choice("".join(delta.text for delta in deltas))
    for delta in deltas:
        choice.finish_reason = delta.finish_reason or ""
        choice.reports.extend(delta.reports)
        for call in delta.calls:
            if call.call_id is not None and call.name is not None:
                choice.calls.append(ToolCall(call.call_id, call.name, ""))
            choice.calls[call.index].arguments += call.arguments
    return choice


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all objects of one answer share, and what was asked of them.

    Attributes:
        answer_id: OpenAI's `id`, the same in every chunk.
        created_s: Unix time of the answer.
        model: the served name.
        include_usage: whether a stream ends with its usage; every other chunk then has a null in its place.
        num_logprobs: how many likely tokens are reported per token; None reports nothing.
        has_content: whether there can be content besides tool calls.
    """

    answer_id: str
    created_s: int
    model: str
    include_usage: bool
    num_logprobs: int | None
    has_content: bool = True


class AnswerFormat(ABC):
    """Makes the JSON objects of one answer."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    @abstractmethod
    def opening_chunks(self, num_sequences: int) -> list[dict[str, Any]]:
        """What a stream starts with."""

    @abstractmethod
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of one delta."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed."""

    @abstractmethod
    def _chunk_object(self) -> str:
        """OpenAI's `object` of a chunk."""

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream with usage."""
        return {**self._chunk([]), "usage": usage.body()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._members(self._chunk_object()), "choices": choices}
        return {**chunk, "usage": None} if self._head.include_usage else chunk

    def _members(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {"id": head.answer_id, "object": kind, "created": head.created_s, "model": head.model}

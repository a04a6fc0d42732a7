"""The shape of an answer, whole or in chunks; each generating endpoint has its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from mlxcel_paged.server.generation import Delta, Usage


class AnswerFormat(ABC):
    """Makes the JSON objects of one answer.

    Args:
        answer_id: OpenAI's `id`, the same in every chunk.
        created_s: Unix time of the answer.
        model: the served name.
        include_usage: whether a stream ends with its usage; every other chunk then has a null in its place.
    """

    def __init__(self, answer_id: str, created_s: int, model: str, include_usage: bool) -> None:
        self._answer_id = answer_id
        self._created_s = created_s
        self._model = model
        self._include_usage = include_usage

    @abstractmethod
    def opening_chunks(self, num_sequences: int) -> list[dict[str, Any]]:
        """What a stream starts with."""

    @abstractmethod
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of one delta."""

    @abstractmethod
    def whole(self, texts: Sequence[str], finish_reasons: Sequence[str], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed."""

    @abstractmethod
    def _chunk_object(self) -> str:
        """OpenAI's `object` of a chunk."""

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream with usage."""
        return {**self._chunk([]), "usage": usage.body()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head(self._chunk_object()), "choices": choices}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._answer_id, "object": kind, "created": self._created_s, "model": self._model}

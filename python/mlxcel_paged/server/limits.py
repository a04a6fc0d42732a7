"""How much may be open at a time. What a single request may hold is the engine's decision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlxcel_paged.server.engine_api import Engine
from mlxcel_paged.server.errors import ApiError


class OpenSequences:
    """Counts the sequences whose requests were read and are not answered yet, those being tokenized included.

    Args:
        maximum: open at most.
        retry_after_s: what a refused client is told to wait.

    Attributes:
        num_open: open now.
    """

    def __init__(self, maximum: int, retry_after_s: int) -> None:
        self.num_open = 0
        self._maximum = maximum
        self._retry_after_s = retry_after_s

    @contextmanager
    def holding(self, num_sequences: int) -> Iterator[None]:
        """Counts new sequences in for the length of the block.

        Raises:
            ApiError: 429, they would be too many.
        """
        if self.num_open + num_sequences > self._maximum:
            message = f"{self.num_open} sequences are open and at most {self._maximum} may be; try again later"
            raise too_many_requests(message, self._retry_after_s)
        self.num_open += num_sequences
        try:
            yield
        finally:
            self.num_open -= num_sequences


class EncodingSequences:
    """Counts the sequences that are being tokenized, and refuses those that the engine's queue has no room for.

    Asked before anything is tokenized: in a flood a refusal must not wait behind the prompts of others.

    Args:
        engine: whose queue it is.
        retry_after_s: what a refused client is told to wait.
    """

    def __init__(self, engine: Engine, retry_after_s: int) -> None:
        self.num_encoding = 0
        self._engine = engine
        self._retry_after_s = retry_after_s

    @contextmanager
    def holding(self, num_sequences: int) -> Iterator[None]:
        """Counts new sequences in for the length of the block, which ends when they are submitted.

        Raises:
            ApiError: 429, the queue has no room for them.
        """
        room = self._engine.queue_room
        # One request alone is the engine's to refuse: it knows what can never fit.
        if room is not None and self.num_encoding + num_sequences > room and (self.num_encoding or room < 1):
            raise too_many_requests("as many requests are waiting as may; try again later", self._retry_after_s)
        self.num_encoding += num_sequences
        try:
            yield
        finally:
            self.num_encoding -= num_sequences


def too_many_requests(message: str, retry_after_s: int) -> ApiError:
    """A 429 that says when to come back."""
    return ApiError(429, "queue_full", message, headers={"retry-after": str(retry_after_s)})

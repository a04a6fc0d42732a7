"""How much may be open at a time. What a single request may hold is the engine's decision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


def too_many_requests(message: str, retry_after_s: int) -> ApiError:
    """A 429 that says when to come back."""
    return ApiError(429, "queue_full", message, headers={"retry-after": str(retry_after_s)})

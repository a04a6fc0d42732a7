"""How much may be open at a time. What a single request may hold is the engine's decision."""

from __future__ import annotations

from mlxcel_paged.server.errors import ApiError


class OpenSequences:
    """Counts the sequences that were submitted and have not been closed.

    Args:
        maximum: open at most.
        retry_after_s: what a refused client is told to wait.
    """

    def __init__(self, maximum: int, retry_after_s: int) -> None:
        self.num_open = 0
        self._maximum = maximum
        self._retry_after_s = retry_after_s

    def open(self, num_sequences: int) -> None:
        """Counts new sequences in.

        Raises:
            ApiError: 429, they would be too many; none is counted.
        """
        if self.num_open + num_sequences > self._maximum:
            message = f"{self.num_open} sequences are open and at most {self._maximum} may be; try again later"
            raise too_many_requests(message, self._retry_after_s)
        self.num_open += num_sequences

    def close(self, num_sequences: int) -> None:
        """Counts sequences out."""
        self.num_open -= num_sequences


def too_many_requests(message: str, retry_after_s: int) -> ApiError:
    """A 429 that says when to come back."""
    return ApiError(429, "queue_full", message, headers={"retry-after": str(retry_after_s)})

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


class Arrivals:
    """Counts the sequences that were read and are not in the engine's queue yet, and refuses what it has no room for.

    Asked as soon as a request is parsed and without letting go of the event loop in between: in a flood a refusal must
    wait neither for the prompts of others to be tokenized nor for the rest of the flood to be read.

    Args:
        engine: whose queue it is.
        retry_after_s: what a refused client is told to wait.

    Attributes:
        num_arriving: counted now.
    """

    def __init__(self, engine: Engine, retry_after_s: int) -> None:
        self.num_arriving = 0
        self._engine = engine
        self._retry_after_s = retry_after_s

    def enter(self) -> Arrival:
        """Counts a request in, as one sequence until it is known better; `leave` it.

        Raises:
            ApiError: 429, the queue has no room.
        """
        arrival = Arrival(self)
        arrival.grow(1)
        return arrival

    def require_room(self, num_sequences: int) -> None:
        """Raises a 429 unless the queue has room for that many besides those that were counted.

        What can never fit is the engine's to refuse, so a request that is alone and finds the queue empty passes.
        """
        room = self._engine.queue_room
        if room is not None and self.num_arriving + num_sequences > room and (self.num_arriving or room < 1):
            raise too_many_requests("as many requests are waiting as may; try again later", self._retry_after_s)


class Arrival:
    """One request between parsing and the engine's queue."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._num_sequences = 0

    def grow(self, num_sequences: int) -> None:
        """Counts `num_sequences` in all for this request.

        Raises:
            ApiError: 429, the queue has no room for them.
        """
        mine, self._num_sequences = self._num_sequences, 0
        self._arrivals.num_arriving -= mine
        self._arrivals.require_room(num_sequences)
        self._arrivals.num_arriving += num_sequences
        self._num_sequences = num_sequences

    def leave(self) -> None:
        """Counts it out. A second call does nothing."""
        self._arrivals.num_arriving -= self._num_sequences
        self._num_sequences = 0


def too_many_requests(message: str, retry_after_s: int) -> ApiError:
    """A 429 that says when to come back."""
    return ApiError(429, "queue_full", message, headers={"retry-after": str(retry_after_s)})

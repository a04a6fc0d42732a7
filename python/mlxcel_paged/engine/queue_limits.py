"""How much may wait for a place in the batch. Beyond it a request is refused at once instead of waiting for ever."""

from __future__ import annotations

from dataclasses import dataclass

from mlxcel_paged.field_checks import check_count
from mlxcel_paged.request import InvalidRequestError, QueueFullError


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of an engine's queue.

    Attributes:
        max_requests: requests that wait at most; None is no bound.
        max_tokens: prompt tokens of the requests that wait at most; None is no bound. A queue that is empty takes a
            longer one too: it would never be served otherwise.
    """

    max_requests: int | None = 256
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        # Under the names that the engine gives them.
        for name, value in (("max_queued_requests", self.max_requests), ("max_queued_tokens", self.max_tokens)):
            if value is not None:
                check_count(name, value, "at least 1")

    def room(self, num_queued: int, num_free_places: int) -> int | None:
        """Requests that may still be queued; None is no bound.

        Args:
            num_queued: requests in the queue, those included that were not seen by the scheduler yet.
            num_free_places: places in the batch: a request that one is there for does not wait.
        """
        return None if self.max_requests is None else max(0, self.max_requests + num_free_places - num_queued)

    def check(
        self, *, num_new: int, num_new_tokens: int, num_queued: int, num_queued_tokens: int, num_free_places: int
    ) -> None:
        """Returns if the new requests may all be queued.

        Raises:
            QueueFullError: not now.
            InvalidRequestError: never, they are more than an empty queue takes.
        """
        num_waiting = max(0, num_queued - num_free_places)
        if self.max_requests is not None and num_new > self.max_requests + num_free_places - num_queued:
            if num_new > self.max_requests and num_queued == 0:
                raise InvalidRequestError("n", num_new, f"at most {self.max_requests}, what the queue holds")
            raise QueueFullError(num_waiting)
        is_queued_on = num_queued > 0 and num_queued + num_new > num_free_places
        if self.max_tokens is not None and is_queued_on and num_queued_tokens + num_new_tokens > self.max_tokens:
            raise QueueFullError(num_waiting, num_queued_tokens)

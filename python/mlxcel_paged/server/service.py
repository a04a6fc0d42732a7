"""What the endpoints of one server share: the engine, the model's text tools, limits and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from mlxcel_paged.server.config import ServerConfig
from mlxcel_paged.server.engine_api import FAILED, LOADING, READY, Engine
from mlxcel_paged.server.errors import ApiError, aborted, engine_failed
from mlxcel_paged.server.limits import Arrivals, OpenSequences
from mlxcel_paged.server.metrics import Metrics
from mlxcel_paged.server.model_text import ModelText

_T = TypeVar("_T")


class AbortableGeneration(Protocol):
    """The sequences of a request that runs."""

    def abort(self) -> int:
        """Withdraws those that run and returns how many; each is answered as aborted."""


class Service:
    """The shared state of one app. Used from the event loop alone."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.metrics = Metrics(engine)
        self.open_sequences = OpenSequences(config.max_open_sequences, config.retry_after_s)
        self.arrivals = Arrivals(engine, config.retry_after_s)
        self.created_s = int(time.time())
        self.is_draining = False
        self._is_aborting = False
        self._generations: set[AbortableGeneration] = set()
        self._text: ModelText | None = None
        # One thread: tokenizers are not safe to share, and a long prompt must not stall the event loop.
        self._text_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlxcel-paged-text")

    def require_ready(self) -> None:
        """Returns when requests can be taken.

        Raises:
            ApiError: 503, the model is still loading, the engine is dead, or the server is stopping.
        """
        self.require_engine()
        if self.is_draining:
            raise _stopping()

    def require_engine(self) -> None:
        """Returns when requests that were taken can go on.

        Raises:
            ApiError: 503, there is no engine to run them.
        """
        state = self.engine.state
        if state == READY:
            return
        if state == FAILED:
            raise engine_failed()
        if state == LOADING:
            headers = {"retry-after": str(self.config.retry_after_s)}
            raise ApiError(503, "model_loading", "the model is still loading", headers=headers)
        raise _stopping()

    def text(self) -> ModelText:
        """The text tools of the loaded model.

        Raises:
            ApiError: 503, there is no loaded model.
        """
        self.require_ready()
        if self._text is None:
            self._text = ModelText(self.engine.model, self.config)
        return self._text

    def begin_drain(self) -> None:
        """Refuses requests from now on; those that were read go on."""
        self.is_draining = True

    def abort_all(self) -> int:
        """Aborts every sequence that is open, and those that are about to be; returns how many were open."""
        self._is_aborting = True
        return sum(generation.abort() for generation in list(self._generations))

    def enter(self, generation: AbortableGeneration) -> None:
        """Counts a generation in; `leave` it.

        Raises:
            ApiError: 503, what is open is being aborted.
        """
        if self._is_aborting:
            raise aborted()
        self._generations.add(generation)

    def leave(self, generation: AbortableGeneration) -> None:
        """Counts a generation out."""
        self._generations.discard(generation)

    def counts(self) -> dict[str, int]:
        """What is open in the server; all 0 when nothing is."""
        return {
            "open_sequences": self.open_sequences.num_open,
            "arriving_sequences": self.arrivals.num_arriving,
            "generations": len(self._generations),
        }

    async def in_text_thread(self, work: Callable[[], _T]) -> _T:
        """Runs tokenizer work off the event loop, one piece at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, work)

    def close(self) -> None:
        """Ends the text thread; what is queued for it is dropped."""
        self._text_thread.shutdown(wait=True, cancel_futures=True)


def _stopping() -> ApiError:
    return ApiError(503, "engine_stopped", "the server is stopping")

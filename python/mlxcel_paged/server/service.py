"""What the endpoints of one server share: the engine, the model's text tools, limits and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mlxcel_paged.server.config import ServerConfig
from mlxcel_paged.server.engine_api import FAILED, LOADING, READY, Engine
from mlxcel_paged.server.errors import ApiError, engine_failed
from mlxcel_paged.server.limits import OpenSequences
from mlxcel_paged.server.metrics import Metrics
from mlxcel_paged.server.model_text import ModelText

_T = TypeVar("_T")


class Service:
    """The shared state of one app. Used from the event loop alone."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.metrics = Metrics(engine)
        self.open_sequences = OpenSequences(config.max_open_sequences, config.retry_after_s)
        self.created_s = int(time.time())
        self._text: ModelText | None = None
        # One thread: tokenizers are not safe to share, and a long prompt must not stall the event loop.
        self._text_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlxcel-paged-text")

    def require_ready(self) -> None:
        """Returns when requests can be served.

        Raises:
            ApiError: 503, the model is still loading or the engine is dead.
        """
        state = self.engine.state
        if state == READY:
            return
        if state == FAILED:
            raise engine_failed()
        if state == LOADING:
            headers = {"retry-after": str(self.config.retry_after_s)}
            raise ApiError(503, "model_loading", "the model is still loading", headers=headers)
        raise ApiError(503, "engine_stopped", "the server is stopping")

    def text(self) -> ModelText:
        """The text tools of the loaded model.

        Raises:
            ApiError: 503, there is no loaded model.
        """
        self.require_ready()
        if self._text is None:
            self._text = ModelText(self.engine.model, self.config)
        return self._text

    async def in_text_thread(self, work: Callable[[], _T]) -> _T:
        """Runs tokenizer work off the event loop, one piece at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, work)

    def close(self) -> None:
        """Ends the text thread; what is queued for it is dropped."""
        self._text_thread.shutdown(wait=True, cancel_futures=True)

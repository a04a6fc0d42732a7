"""A server over the real engine and the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine

from .running_server import RunningServer


@contextmanager
def embedded_server(**settings: Any) -> Iterator[RunningServer]:
    """Serves the embedded model with engine settings; ends with the leak check."""
    from mlxcel_paged.engine.build import build_core

    # MLX is imported already in a test process, too late to choose its BLAS.
    engine = Engine(EngineConfig(**{"max_context": 512, **settings}), build=build_core)
    engine.start()
    server = RunningServer(engine)
    try:
        engine.wait_until_ready(120)
        yield server
        server.wait_idle()
    finally:
        server.close()
        engine.stop()

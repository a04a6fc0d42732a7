"""Threads that run MLX. They are parked and reused when an engine ends, and never exit before the process does.

MLX keeps compiled functions per thread, and frees them when the system's thread exits: after Python has forgotten it,
by taking the GIL. If the interpreter is shutting down by then, that ends the process with `terminate called without an
active exception` (mlx 0.32.4, CPython 3.11; joining the thread does not help). A parked thread never gets there.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

_EXIT_TIMEOUT_S = 10.0

_lock = threading.Lock()
_parked: list[_Worker] = []


class Stoppable(Protocol):
    """What runs on such a thread for long."""

    def stop(self, *, timeout_s: float | None = None) -> bool: ...


_running: weakref.WeakSet[Stoppable] = weakref.WeakSet()


class _Worker:
    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="mlxcel-paged-mlx", daemon=True).start()

    def _run(self) -> None:
        while True:
            task, ended = self.tasks.get()
            try:
                task()
            finally:
                del task  # or the engine would live until the next one starts
                with _lock:
                    _parked.append(self)
                ended.set()


def run_on_mlx_thread(task: Callable[[], None]) -> threading.Event:
    """Runs `task`, which must not raise, on a thread of its own.

    Returns:
        An event that is set when the task has ended.
    """
    ended = threading.Event()
    with _lock:
        worker = _parked.pop() if _parked else None
    (worker or _Worker()).tasks.put((task, ended))
    return ended


def stop_at_exit(engine: Stoppable) -> None:
    """Stops `engine` when the interpreter ends: a thread that came back from MLX later could not take the GIL."""
    _running.add(engine)


@atexit.register
def _stop_all() -> None:
    for engine in list(_running):
        engine.stop(timeout_s=_EXIT_TIMEOUT_S)

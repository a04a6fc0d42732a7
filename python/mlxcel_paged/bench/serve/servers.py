"""Where the server of an arm is: all arms' servers side by side, one at a time, or one that was there already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

from mlxcel_paged.bench.serve.arms import arm_environment, arm_flags
from mlxcel_paged.bench.serve.server_process import running_server, wait_while_loading


class Servers(Protocol):
    """Gives the URL of an arm's server for the time of a turn."""

    def of(self, arm: str) -> AbstractContextManager[tuple[str, bool]]:
        """Yields the URL, and whether this server has not been given out before."""


class ExistingServer:
    """A server that somebody else runs; it is every arm's.

    Args:
        base_url: with or without `/v1`.
        start_timeout_s: seconds that it may still be loading.
    """

    def __init__(self, base_url: str, *, start_timeout_s: float) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._start_timeout_s = start_timeout_s
        self._is_new = True

    def of(self, _arm: str) -> AbstractContextManager[tuple[str, bool]]:
        is_new, self._is_new = self._is_new, False
        if is_new:
            wait_while_loading(self._base_url, self._start_timeout_s)
        return nullcontext((self._base_url, is_new))


class StartedServers:
    """Starts servers of this package.

    Args:
        arguments: flags of `serve` that all arms share.
        start_timeout_s: seconds that a server has to load and check its model.
        together: keep every arm's server from its first turn on, so that turns follow each other closely; else a server
            lives for one turn and has the machine's memory to itself.
    """

    def __init__(self, arguments: Sequence[str], *, start_timeout_s: float, together: bool) -> None:
        self._arguments = list(arguments)
        self._start_timeout_s = start_timeout_s
        self._together = together
        self._kept: dict[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> StartedServers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def of(self, arm: str) -> Iterator[tuple[str, bool]]:
        if not self._together:
            with self._start(arm) as url:
                yield url, True
            return
        is_new = arm not in self._kept
        if is_new:
            self._kept[arm] = self._stack.enter_context(self._start(arm))
        yield self._kept[arm], is_new

    def _start(self, arm: str) -> AbstractContextManager[str]:
        # What the caller chose comes last and wins; a flag that moves the arm off its path shows in its launches.
        return running_server(
            [*arm_flags(arm), *self._arguments],
            environment=arm_environment(arm),
            start_timeout_s=self._start_timeout_s,
        )

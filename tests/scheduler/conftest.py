"""Every scheduler test ends with a leak check of the loops that it made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from . import scripted


@pytest.fixture
def loop_of() -> Iterator[Callable[..., scripted.Loop]]:
    """Makes loops as `scripted.make_loop` does; at the end of the test nothing may be held any more."""
    loops: list[scripted.Loop] = []

    def make(*args: Any, **kwargs: Any) -> scripted.Loop:
        loops.append(scripted.make_loop(*args, **kwargs))
        return loops[-1]

    yield make
    for loop in loops:
        loop.check_drained()

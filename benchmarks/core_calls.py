"""Times the calls that Python makes into the Rust core, one by one, with two clock reads around each.

Every method and every attribute of the core's bookkeeping classes is replaced, on the class itself, by a function that
reads the clock, calls the original and reads the clock again. Whoever holds an object of the class goes through it, so
no call can be forgotten as long as the class is listed; `profiled` checks that with the interpreter's own profiling
hook. What a call takes on the list is what Python sees, the crossing into Rust and back included.

The two reads cost something too, and so does the call of the original through a reference. `calibrate` measures both
on an empty C function, under the conditions that the calls themselves meet; it also brings the timing code, which is no
part of what is measured, into the caches.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from types import GetSetDescriptorType, MethodDescriptorType
from typing import Any

from mlxcel_paged import _core

# What keeps the books of a step. The kernels of the CPU are functions of the module.
CLASSES = ("BlockBudget", "DecodePlan", "DecodeRows", "DeviceMirror", "PagePool", "PageTable", "Slot", "Append")
_NUM_CALIBRATIONS = 9


class CoreCalls:
    """The calls between `install` and `remove`, as (qualified name, nanoseconds)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._originals: list[tuple[Any, str, Any]] = []
        self._empty = _timed(abs, self.calls, "")

    def install(self) -> None:
        """Puts the timing functions in place."""
        for name in CLASSES:
            kind: Any = getattr(_core, name, None)
            for attribute, original in [] if kind is None else list(vars(kind).items()):
                timed = self._replacement(f"{name}.{attribute}", original)
                if timed is not None:
                    self._originals.append((kind, attribute, original))
                    setattr(kind, attribute, timed)

    def remove(self) -> None:
        """Puts the originals back."""
        for kind, attribute, original in self._originals:
            setattr(kind, attribute, original)
        self._originals.clear()

    def take(self) -> list[tuple[str, int]]:
        """The calls since the last `take`, which are forgotten."""
        taken = self.calls.copy()
        self.calls.clear()
        return taken

    def calibrate(self) -> int:
        """Nanoseconds that the list shows for a call that does nothing, here and now; forgets the calls so far."""
        self.calls.clear()
        for _ in range(_NUM_CALIBRATIONS):
            self._empty(0)
        return round(statistics.median(ns for _, ns in self.take()))

    @contextmanager
    def profiled(self) -> Iterator[Counter[str]]:
        """Counts the calls into the core that bypass the timing functions, by the interpreter's profiling hook.

        Yields:
            What was called: functions of the module under their name, and methods that nobody timed. Filled at the end.
        """
        seen: Counter[str] = Counter()
        found: Counter[str] = Counter()

        def hook(_frame: Any, event: str, callee: Any) -> None:
            if event == "c_call" and _is_of_core(callee):
                seen[callee.__qualname__] += 1

        self.calls.clear()
        sys.setprofile(hook)
        try:
            yield found
        finally:
            sys.setprofile(None)
            found.update(seen - Counter(name for name, _ in self.take()))

    def _replacement(self, name: str, original: Any) -> Any:
        if isinstance(original, staticmethod):
            return staticmethod(_timed(original.__func__, self.calls, name))
        if isinstance(original, MethodDescriptorType):
            return _timed(original, self.calls, name)
        if isinstance(original, GetSetDescriptorType) and not name.endswith("__"):
            return property(_timed(original.__get__, self.calls, name))
        return None


def _timed(call: Callable[..., Any], calls: list[tuple[str, int]], name: str) -> Callable[..., Any]:
    clock, note = perf_counter_ns, calls.append

    def timed(*arguments: Any) -> Any:
        started = clock()
        result = call(*arguments)
        ended = clock()
        note((name, ended - started))
        return result

    return timed


def _is_of_core(callee: Any) -> bool:
    bound_to = getattr(callee, "__self__", None)
    if bound_to is _core:
        return True
    owner = getattr(callee, "__qualname__", "").partition(".")[0]
    if bound_to is None:  # a static method
        return owner in CLASSES
    kind = bound_to if isinstance(bound_to, type) else type(bound_to)
    return kind.__module__ == _core.__name__

"""Builds, without evaluating, one decode pass of a model, and reports what its modules and its attention are given.

MLX's arrays are lazy, so a pass costs milliseconds and no memory. A trace keeps every array that it has seen: whether
two of them are the same object stays meaningful as long as the trace lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxcel_paged.kvcache.handle import KeyHandle
from mlxcel_paged.kvcache.layer_cache import PagedLayerCache
from mlxcel_paged.kvcache.step import Step
from mlxcel_paged.models import hook

# Two sequences at different positions: what depends on one sequence alone, or on one position for all, shows.
_POSITIONS = (3, 5)


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module in the pass."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


@dataclass(frozen=True, slots=True)
class AttendCall:
    """One attention launch in the pass: queries, and the handle with the new keys and values."""

    handle: KeyHandle
    queries: mx.array


@dataclass(slots=True)
class DecodeTrace:
    """What happened in a pass, in order; the step of its caches.

    Attributes:
        offset: Positions of the rows, the object that the caches hand out.
        calls: Calls of the watched modules.
        attends: Attention launches.
    """

    offset: mx.array = field(default_factory=lambda: mx.array(_POSITIONS, mx.int32))
    calls: list[ModuleCall] = field(default_factory=list)
    attends: list[AttendCall] = field(default_factory=list)

    def attend(self, handle: KeyHandle, queries: mx.array, **_options: Any) -> mx.array:
        """Notes the launch, whatever its options; the output has the right shape and is never evaluated."""
        self.attends.append(AttendCall(handle, queries))
        return queries

    def release(self) -> None:
        """Drops what was seen: handles refer back to the trace, so all of it would wait for the garbage collector."""
        self.calls.clear()
        self.attends.clear()


def trace_decode(model: nn.Module, num_caches: int, watched: Sequence[nn.Module] = ()) -> DecodeTrace:
    """Builds a decode pass of `model` and returns what happened in it.

    Args:
        num_caches: Caches that the model is called with, one per layer that keeps KV.
        watched: Modules of the model whose calls are to be noted.
    """
    trace = DecodeTrace()
    with _watch(watched, trace.calls):
        build_pass(model, num_caches, trace, mx.zeros((len(_POSITIONS), 1), mx.int32))
    return trace


def build_pass(model: nn.Module, num_caches: int, step: Step, tokens: mx.array) -> mx.array:
    """Calls `model` with paged caches of `step`; returns its logits, not evaluated. What it raises goes through."""
    return call_with_caches(model, [PagedLayerCache(layer, step) for layer in range(num_caches)], tokens)


def call_with_caches(model: nn.Module, caches: Sequence[PagedLayerCache], tokens: mx.array) -> mx.array:
    """As `build_pass`, with these caches."""
    hook.install()
    logits: mx.array = model(tokens, cache=list(caches))
    return logits


@contextmanager
def _watch(modules: Sequence[nn.Module], calls: list[ModuleCall]) -> Iterator[None]:
    """Inside, calls of `modules` are noted in `calls`: each is of a subclass that is made for it."""
    classes = [type(module) for module in modules]
    notes = [calls]
    watching = {cls: _watching(cls, notes) for cls in set(classes)}
    try:
        for module, cls in zip(modules, classes, strict=True):
            module.__class__ = watching[cls]
        yield
    finally:
        for module, cls in zip(modules, classes, strict=True):
            module.__class__ = cls
        notes.clear()  # a class lives until the garbage collector runs; the pass and the model must not


def _watching(cls: type, notes: list[list[ModuleCall]]) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = cls.__call__(self, *args, **kwargs)
        for calls in notes:  # none if the pass has ended meanwhile
            calls.append(ModuleCall(self, args, kwargs, result))
        return result

    return type(cls.__name__, (cls,), {"__call__": call})

"""Moves RoPE of queries and keys into the attention launch of decode passes on CUDA.

RoPE is two launches a layer that take longer than what they compute: 64 of the 480 of an 8B model's step. The model's
files stay as they are; its RoPE modules become subclasses that put the rotation off in the passes that ask for it
(`mlxcel_paged.kvcache.rotation`), and compute as before in all others. Whether a model hands what RoPE returns
straight to its attention is not assumed, a trace of a decode pass tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import rope_utils

from mlxcel_paged.kernels_cuda.variant import ROPE_MULTIPLE, RopeShape
from mlxcel_paged.kvcache.layout import KVLayout
from mlxcel_paged.kvcache.rotation import (
    Rotation,
    RotationError,
    Unrotated,
    begin_deferring,
    end_deferring,
    is_deferred,
)
from mlxcel_paged.models.decode_trace import DecodeTrace, ModuleCall, build_pass, trace_decode

logger = logging.getLogger("mlxcel_paged")


class _Deferring:
    """In front of a RoPE class: puts the rotation off where the pass asks for it, until it is changed."""

    __slots__ = ()
    _own_class: type
    _deferred_rotation: Rotation

    # Writes are watched and not reads: a pass pays nothing for it.
    def __setattr__(self, name: str, value: Any) -> None:
        if name in _TURNS_BY:
            self.__class__ = self._own_class
            setattr(self, name, value)
        else:
            super().__setattr__(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in _TURNS_BY:
            self.__class__ = self._own_class
            self[name] = value
        else:
            super().__setitem__(name, value)  # type: ignore[misc]

    # A dict's own union would go past the write above.
    def __ior__(self, values: Any) -> Any:
        for name, value in dict(values).items():
            self[name] = value
        return self

    def __call__(self, x: mx.array, offset: Any = 0, *others: Any, **named: Any) -> mx.array | Unrotated:
        if is_deferred(offset):
            if others or named:
                raise RotationError(f"a RoPE whose calls were plain is called with {others}, {named} too")
            return Unrotated(x, self._deferred_rotation)
        rotated: mx.array = super().__call__(x, offset, *others, **named)  # type: ignore[misc]
        return rotated


def _plain(module: Any) -> Rotation:
    return Rotation(
        dims=module.dims,
        traditional=bool(module.traditional),
        base=float(module.base),
        scale=float(module.scale),
        freqs=None,
    )


def _by_freqs(module: Any) -> Rotation | None:
    # Yarn scales what it turns; the others have no such factor.
    if getattr(module, "mscale", 1.0) != 1.0:
        return None
    freqs = module._freqs.astype(mx.float32)
    return Rotation(dims=module.dims, traditional=bool(module.traditional), base=None, scale=1.0, freqs=freqs)


# Classes whose call is `mx.fast.rope` and nothing else, and how they call it. Subclasses may do more.
_KINDS: dict[type, Callable[[Any], Rotation | None]] = {
    nn.RoPE: _plain,
    rope_utils.Llama3RoPE: _by_freqs,
    rope_utils.YarnRoPE: _by_freqs,
    rope_utils.ProportionalRoPE: _by_freqs,
}
# All that their calls, and so their `Rotation`s, depend on.
_TURNS_BY = frozenset({"dims", "traditional", "base", "scale", "mscale", "_freqs"})
_DEFERRING: dict[type, type] = {
    cls: type(f"Deferring{cls.__name__}", (_Deferring, cls), {"_own_class": cls}) for cls in _KINDS
}
_KINDS.update({deferring: _KINDS[cls] for cls, deferring in _DEFERRING.items()})


def defer_rope(model: nn.Module, layout: KVLayout) -> list[set[RopeShape]]:
    """Lets the RoPE modules of `model` put their rotations off, if attention gets what they return as it is.

    Only passes between `begin_deferring` and `end_deferring` change. A model may be turned any number of times.

    A module whose base, scale, dims or frequencies are set afterwards turns queries and keys itself from then on, by
    what was set, until the model is turned again. If another module turns the keys, set both: a pass with one of them
    alone raises `RotationError`. Elements that are written into an array of frequencies in place go unseen.

    Returns:
        For every KV group, what its launches are asked to apply in such passes; all empty if nothing was turned.
    """
    nothing: list[set[RopeShape]] = [set() for _ in layout.groups]
    rotations = _rotations(model)
    if not rotations:
        return nothing
    modules = [module for module, _ in rotations.values()]
    trace = trace_decode(model, layout.num_layers, modules)
    turned = _deferrable(trace, {key: rotation for key, (_, rotation) in rotations.items()})
    if not turned:
        return nothing
    classes = {id(module): type(module) for module in modules}
    for key in turned:
        module, rotation = rotations[key]
        module._deferred_rotation = rotation
        module.__class__ = _DEFERRING.get(type(module), type(module))
    shapes = nothing
    try:
        for layer, rotation in _deferred_layers(model, layout.num_layers):
            shapes[layout.group_of_layer[layer]].add(RopeShape(rotation.dims, rotation.traditional))
    except Exception as error:
        for key in turned:
            rotations[key][0].__class__ = classes[key]
        logger.info("RoPE stays outside attention: %s: %s", type(error).__name__, error)
        return [set() for _ in layout.groups]
    logger.info("attention applies the RoPE of %d of %d modules", len(turned), len(modules))
    return shapes


def _rotations(model: nn.Module) -> dict[int, tuple[Any, Rotation]]:
    """The modules that could be turned, by id, each with its rotation; modules that are configured alike share one."""
    found: dict[int, tuple[Any, Rotation]] = {}
    by_key: dict[object, Rotation] = {}
    for module in model.modules():
        kind = _KINDS.get(type(module))
        rotation = None if kind is None else kind(module)
        if rotation is not None and rotation.dims % ROPE_MULTIPLE == 0:
            found[id(module)] = (module, by_key.setdefault(rotation.key, rotation))
    return found


def _deferrable(trace: DecodeTrace, rotations: dict[int, Rotation]) -> set[int]:
    """Ids of the modules all of whose results are queries or new keys of a launch, in pairs that turn alike."""
    made = {id(call.result): id(call.module) for call in trace.calls}
    pairs = [(made.get(id(attend.queries)), made.get(id(attend.handle.k_new))) for attend in trace.attends]
    handed_over = {id(array) for attend in trace.attends for array in (attend.queries, attend.handle.k_new)}
    good = {id(call.module) for call in trace.calls}
    good -= {id(call.module) for call in trace.calls if not _is_plain_call(call, trace.offset)}
    good -= {id(call.module) for call in trace.calls if id(call.result) not in handed_over}
    while True:
        bad = {module for pair in pairs if not _turn_alike(*pair, good, rotations) for module in pair}
        if not good & bad:
            return good
        good -= bad


def _turn_alike(queries: int | None, keys: int | None, good: set[int], rotations: dict[int, Rotation]) -> bool:
    if queries is None or keys is None or not {queries, keys} <= good:
        return False
    return rotations[queries] is rotations[keys]


def _is_plain_call(call: ModuleCall, offset: mx.array) -> bool:
    """Whether it turns one token a row, by the pass's own positions."""
    if not call.args:
        return False
    x, *positional = call.args
    arguments = [*positional, *call.kwargs.values()]
    return x.ndim == 4 and x.shape[2] == 1 and len(arguments) == 1 and arguments[0] is offset


def _deferred_layers(model: nn.Module, num_caches: int) -> Iterable[tuple[int, Rotation]]:
    """Layers and rotations of a pass that puts them off; raises whatever the model makes of that."""
    trace = DecodeTrace()
    begin_deferring(trace.offset)
    try:
        build_pass(model, num_caches, trace, mx.zeros((trace.offset.shape[0], 1), mx.int32))
    finally:
        end_deferring()
    return [
        (attend.handle.layer, attend.handle.rotation) for attend in trace.attends if attend.handle.rotation is not None
    ]

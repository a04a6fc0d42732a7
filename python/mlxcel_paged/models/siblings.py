"""Computes the products that layers make of one and the same input in one launch.

Query, key and value projections see one array, and so do gate and up. A launch costs the host microseconds and a small
product leaves most of a GPU idle, so the layer that is called first computes for all, and its siblings pick their
outputs up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxcel_paged.models.decode_trace import trace_decode
from mlxcel_paged.models.product_launch import MAX_PARTS

Launch = Callable[[mx.array], list[mx.array] | None]
"""Returns the products of some layers with an input, or None if the kernel does not serve it."""


class Siblings:
    """Two or three layers that are called with the same array in a decode pass.

    Whether a call has the input of the launch before is a matter of the object, not of its values. That holds as long
    as nobody changes the array in place between two calls, which no model of mlx-lm does; the self-check would show it.

    Nothing outlives the input: outputs are dropped with the array that they were computed from, taken or not.

    Input and outputs are one object, so threads that share a model never get each other's outputs; at worst a layer
    computes what another thread's launch has replaced.

    Args:
        launch: The launch for the layers, in their order.
    """

    __slots__ = ("_launch", "_round")

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        # The input of the last launch, and its outputs by place, None once they are taken; None without any.
        self._round: tuple[weakref.ref[mx.array], list[mx.array | None]] | None = None

    def take(self, place: int, x: mx.array) -> mx.array | None:
        """Returns the product of the layer at `place` with `x`, or None if that layer has to compute it alone."""
        last = self._round
        if last is not None:
            is_same = last[0]() is x
            outputs = last[1]
            output = outputs[place]
            if is_same and output is not None:
                outputs[place] = None
                if not any(other is not None for other in outputs):
                    self._forget(last[0])
                return output
            # Called twice with one array, or with another one while its own waits. Only a layer that has taken what was
            # computed for it begins a new round.
            if is_same or output is not None:
                return None
        products = self._launch(x)
        if products is None:
            return None
        others = [product if i != place else None for i, product in enumerate(products)]
        self._round = (weakref.ref(x, self._forget), others)
        return products[place]

    @property
    def num_waiting(self) -> int:
        """Outputs that were computed and not taken yet."""
        last = self._round
        return 0 if last is None else sum(output is not None for output in last[1])

    def _forget(self, of: weakref.ref[mx.array]) -> None:
        last = self._round
        if last is not None and last[0] is of:
            self._round = None


def join_siblings(
    model: nn.Module,
    num_caches: int,
    layers: Sequence[nn.Module],
    launch_of: Callable[[Sequence[nn.Module]], Launch],
) -> int:
    """Makes siblings of those of `layers` that a decode pass calls with the same array.

    Args:
        num_caches: Caches that the model is called with.
        layers: Layers of the model, each with `siblings`, `place` and `alone()`, the `LayersLaunch` that it has alone.
        launch_of: The launch for layers of one kind.

    Returns:
        The layers that have siblings now.
    """
    for layer in layers:
        layer.siblings = None
    trace = trace_decode(model, num_caches, layers)
    num_calls: dict[int, int] = {}
    groups: dict[Hashable, list[nn.Module]] = {}
    for call in trace.calls:
        num_calls[id(call.module)] = num_calls.get(id(call.module), 0) + 1
        launch = call.module.alone().current()
        if launch is not None and len(call.args) == 1 and not call.kwargs:
            groups.setdefault((id(call.args[0]), launch.kind), []).append(call.module)
    trace.release()
    joined = 0
    for group in groups.values():
        once = [layer for layer in group if num_calls[id(layer)] == 1]
        for begin in range(0, len(once), MAX_PARTS):
            members = once[begin : begin + MAX_PARTS]
            if len(members) < 2:
                continue
            siblings = Siblings(launch_of(members))
            for place, layer in enumerate(members):
                layer.siblings, layer.place = siblings, place
                layer.alone().forget()  # seldom called from here on, it would keep weights that were exchanged
            joined += len(members)
    return joined

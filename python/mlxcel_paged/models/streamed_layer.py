"""What layers that compute a decode batch with our kernels have in common, whatever their weights are stored as.

These classes stand in front of a layer's class. They have no slots, so that a living layer's class can be exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxcel_paged.models.product_launch import LayersLaunch
from mlxcel_paged.models.siblings import Siblings


class StreamedLayer:
    """A layer with a launch of its own.

    Copies of the layer start without its launches, which are for its own arrays.

    Attributes:
        layers_launch: One launch for layers of this class.
    """

    __slots__ = ()
    layers_launch: Callable[[Sequence[nn.Module]], LayersLaunch]
    _alone: LayersLaunch | None = None

    def alone(self) -> LayersLaunch:
        """The launch for this layer."""
        if self._alone is None:
            launch = self.layers_launch((self,))
            self._alone = launch  # type: ignore[misc]  # in the dict of the layer's class
        return self._alone

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("siblings", "place", "_alone")}


class SharesLaunches(StreamedLayer):
    """In front of a linear layer: its products come from the kernel, together with those of its siblings."""

    __slots__ = ()
    siblings: Siblings | None = None
    place: int = 0

    def __call__(self, x: mx.array) -> mx.array:
        siblings = self.siblings
        if siblings is not None:
            shared = siblings.take(self.place, x)
            if shared is not None:
                return shared
        products = self.alone()(x)
        if products is not None:
            return products[0]
        whole: mx.array = super().__call__(x)  # type: ignore[misc]
        return whole


class ProjectsToLogits(StreamedLayer):
    """In front of an embedding: its projection to logits comes from the kernel."""

    __slots__ = ()

    def as_linear(self, x: mx.array) -> mx.array:
        products = self.alone()(x)
        if products is not None:
            return products[0]
        whole: mx.array = super().as_linear(x)  # type: ignore[misc]
        return whole

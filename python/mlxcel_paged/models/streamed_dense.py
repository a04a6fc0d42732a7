"""Dense layers that compute a decode batch with our kernel."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxcel_paged.models.dense_kernel import MIN_ROWS, dense_launch, serves_dense
from mlxcel_paged.models.product_launch import LaunchHolder, LayersLaunch, ProductLaunch
from mlxcel_paged.models.siblings import Siblings


# MLX's classes are untyped here.
class StreamedLinear(LaunchHolder, nn.Linear):  # type: ignore[misc]
    """A `Linear` that computes a decode batch with the kernel, together with its siblings."""

    siblings: Siblings | None = None
    place: int = 0
    _alone: LayersLaunch | None = None

    def __call__(self, x: mx.array) -> mx.array:
        siblings = self.siblings
        if siblings is not None:
            shared = siblings.take(self.place, x)
            if shared is not None:
                return shared
        products = self.alone()(x)
        if products is not None:
            return products[0]
        whole: mx.array = super().__call__(x)
        return whole

    def alone(self) -> LayersLaunch:
        """The launch for this layer."""
        if self._alone is None:
            self._alone = dense_layers_launch((self,))
        return self._alone


# MLX's classes are untyped here.
class StreamedEmbedding(LaunchHolder, nn.Embedding):  # type: ignore[misc]
    """An `Embedding` whose projection to logits computes a decode batch with the kernel."""

    _alone: LayersLaunch | None = None

    def as_linear(self, x: mx.array) -> mx.array:
        if self._alone is None:
            self._alone = dense_layers_launch((self,))
        products = self._alone(x)
        if products is not None:
            return products[0]
        whole: mx.array = super().as_linear(x)
        return whole


def dense_layers_launch(layers: Sequence[nn.Module]) -> LayersLaunch:
    """One launch for dense layers."""
    return LayersLaunch(layers, ("weight", "bias"), _prepare, MIN_ROWS)


def _prepare(layers: Sequence[nn.Module]) -> ProductLaunch | None:
    weights = [layer["weight"] for layer in layers]
    biases = [layer.get("bias") for layer in layers]
    dtype, num_inner = weights[0].dtype, weights[0].shape[-1]
    for weight, bias in zip(weights, biases, strict=True):
        if not serves_dense(weight) or weight.dtype != dtype or weight.shape[1] != num_inner:
            return None
        if bias is not None and (bias.dtype != dtype or bias.shape != weight.shape[:1]):
            return None
    return dense_launch(weights, biases)

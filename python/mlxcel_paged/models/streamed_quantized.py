"""Quantized layers that compute a decode batch with our kernel."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxcel_paged.models.affine_kernel import AffineFormat, AffineWeight, affine_format, affine_launch, serves_affine
from mlxcel_paged.models.flat_quantized import FlatQuantizedEmbedding, FlatQuantizedLinear
from mlxcel_paged.models.product_launch import LaunchHolder, LayersLaunch, ProductLaunch
from mlxcel_paged.models.siblings import Siblings


class StreamedQuantizedLinear(LaunchHolder, FlatQuantizedLinear):
    """A `QuantizedLinear` that computes a decode batch with the kernel, together with its siblings."""

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
        return super().__call__(x) if products is None else products[0]

    def alone(self) -> LayersLaunch:
        """The launch for this layer."""
        if self._alone is None:
            self._alone = quantized_layers_launch((self,))
        return self._alone


class StreamedQuantizedEmbedding(LaunchHolder, FlatQuantizedEmbedding):
    """A `QuantizedEmbedding` whose projection to logits computes a decode batch with the kernel."""

    _alone: LayersLaunch | None = None

    def as_linear(self, x: mx.array) -> mx.array:
        if self._alone is None:
            self._alone = quantized_layers_launch((self,))
        products = self._alone(x)
        return super().as_linear(x) if products is None else products[0]


def quantized_layers_launch(layers: Sequence[nn.Module]) -> LayersLaunch:
    """One launch for quantized layers."""
    return LayersLaunch(layers, ("weight", "scales", "biases", "bias"), _prepare, 1)


def layer_format(layer: nn.Module) -> AffineFormat | None:
    """How a quantized layer of MLX is quantized; None if the mode is not `affine`."""
    if layer.mode != "affine" or layer.get("biases") is None:
        return None
    return affine_format(layer.bits, layer.group_size, layer["scales"].dtype)


def _prepare(layers: Sequence[nn.Module]) -> ProductLaunch | None:
    form = layer_format(layers[0])
    num_words = layers[0]["weight"].shape[-1]
    weights = []
    for layer in layers:
        if form is None or layer_format(layer) is not form:
            return None
        weight = AffineWeight(layer["weight"], layer["scales"], layer["biases"], layer.get("bias"))
        if not serves_affine(weight, form) or weight.words.shape[1] != num_words:
            return None
        if weight.bias is not None and (weight.bias.dtype != form.dtype or weight.bias.shape != weight.words.shape[:1]):
            return None
        weights.append(weight)
    return None if form is None else affine_launch(weights, form)

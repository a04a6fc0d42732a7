"""Quantized layers that compute a decode batch with our kernel."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.nn as nn

from mlxcel_paged.models.affine_kernel import AffineFormat, AffineWeight, affine_format, affine_launch, serves_affine
from mlxcel_paged.models.flat_quantized import FlatQuantizedEmbedding, FlatQuantizedLinear
from mlxcel_paged.models.product_launch import LayersLaunch, ProductLaunch
from mlxcel_paged.models.streamed_layer import ProjectsToLogits, SharesLaunches


def quantized_layers_launch(layers: Sequence[nn.Module]) -> LayersLaunch:
    """One launch for quantized layers."""
    return LayersLaunch(layers, ("weight", "scales", "biases", "bias"), _prepare, 1)


class StreamedQuantizedLinear(SharesLaunches, FlatQuantizedLinear):
    """A `QuantizedLinear` that computes a decode batch with the kernel."""

    layers_launch = staticmethod(quantized_layers_launch)


class StreamedQuantizedEmbedding(ProjectsToLogits, FlatQuantizedEmbedding):
    """A `QuantizedEmbedding` whose projection to logits computes a decode batch with the kernel."""

    layers_launch = staticmethod(quantized_layers_launch)


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

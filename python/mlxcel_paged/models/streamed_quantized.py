"""Quantized layers that compute a decode batch with our kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlxcel_paged.models.affine_kernel import AffineFormat, AffineWeight, affine_format, affine_products, serves_affine
from mlxcel_paged.models.flat_quantized import FlatQuantizedEmbedding, FlatQuantizedLinear
from mlxcel_paged.models.product_grid import MAX_ROWS
from mlxcel_paged.models.siblings import Siblings


@dataclass(frozen=True, slots=True)
class AffineKind:
    """What inputs a layer's product can be computed with: `[rows, 1, num_inner]` in the dtype of `form`."""

    form: AffineFormat
    num_inner: int


class _AffineLayer:
    """What linear layers and embeddings with quantized weights have in common. A mixin of modules of MLX."""

    _weight: AffineWeight | None = None
    _kind: AffineKind | None = None

    def product_kind(self) -> AffineKind | None:
        """The inputs that the kernel serves; None if it does not serve the weights."""
        self.affine_weight()
        return self._kind

    def affine_weight(self) -> AffineWeight | None:
        """The layer's arrays, checked when they are not those of the last call."""
        module: nn.Module = self
        words, scales, offsets, bias = module["weight"], module["scales"], module.get("biases"), module.get("bias")
        last = self._weight
        if (
            last is None
            or last.words is not words
            or last.scales is not scales
            or last.offsets is not offsets
            or last.bias is not bias
        ):
            self._kind = None
            self._weight = None
            form = layer_format(module)
            if form is not None:
                weight = AffineWeight(words, scales, offsets, bias)
                has_bias_of_rows = bias is None or (bias.dtype == form.dtype and bias.shape == (words.shape[0],))
                if has_bias_of_rows and serves_affine(weight, form):
                    self._kind = AffineKind(form, words.shape[1] * 32 // form.bits)
                self._weight = weight
        return self._weight


# MLX's classes are untyped here.
class StreamedQuantizedLinear(_AffineLayer, FlatQuantizedLinear):
    """A `QuantizedLinear` that computes a decode batch with the kernel, together with its siblings."""

    siblings: Siblings | None = None
    place: int = 0

    def __call__(self, x: mx.array) -> mx.array:
        if self.siblings is not None:
            shared = self.siblings.take(self.place, x)
            if shared is not None:
                return shared
        alone = launch_quantized((self,), x)
        return super().__call__(x) if alone is None else alone[0]


class StreamedQuantizedEmbedding(_AffineLayer, FlatQuantizedEmbedding):
    """A `QuantizedEmbedding` whose projection to logits computes a decode batch with the kernel."""

    def as_linear(self, x: mx.array) -> mx.array:
        alone = launch_quantized((self,), x)
        return super().as_linear(x) if alone is None else alone[0]


def layer_format(layer: nn.Module) -> AffineFormat | None:
    """How a quantized layer of MLX is quantized; None if the mode is not `affine`."""
    if layer.mode != "affine" or layer.get("biases") is None:
        return None
    return affine_format(layer.bits, layer.group_size, layer["scales"].dtype)


def launch_quantized(layers: Sequence[_AffineLayer], x: mx.array) -> list[mx.array] | None:
    """Returns the products of all `layers` with `x` from one launch, or None if the kernel does not serve them."""
    shape = x.shape
    if len(shape) != 3 or shape[1] != 1 or not 1 <= shape[0] <= MAX_ROWS:
        return None
    weights = []
    form: AffineFormat | None = None
    for layer in layers:
        weight, kind = layer.affine_weight(), layer._kind
        if weight is None or kind is None or kind.num_inner != shape[2] or (form is not None and kind.form is not form):
            return None
        form = kind.form
        weights.append(weight)
    if form is None or x.dtype != form.dtype:
        return None
    return affine_products(x, weights, form)

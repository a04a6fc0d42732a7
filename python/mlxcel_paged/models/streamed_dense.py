"""Dense layers that compute a decode batch with our kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlxcel_paged.models.dense_kernel import MIN_ROWS, dense_products, serves_dense
from mlxcel_paged.models.product_grid import MAX_ROWS
from mlxcel_paged.models.siblings import Siblings


@dataclass(frozen=True, slots=True)
class DenseKind:
    """What inputs a layer's product can be computed with: `[rows, 1, num_inner]` in `dtype`."""

    dtype: mx.Dtype
    num_inner: int


@dataclass(frozen=True, slots=True)
class _Checked:
    """Arrays of a layer, which may be exchanged, and what they serve."""

    weight: mx.array
    bias: mx.array | None
    kind: DenseKind | None


# MLX's classes are untyped here.
class StreamedLinear(nn.Linear):  # type: ignore[misc]
    """A `Linear` that computes a decode batch with the kernel, together with its siblings."""

    siblings: Siblings | None = None
    place: int = 0
    _checked: _Checked | None = None

    def __call__(self, x: mx.array) -> mx.array:
        if self.siblings is not None:
            shared = self.siblings.take(self.place, x)
            if shared is not None:
                return shared
        alone = launch_dense((self,), x)
        if alone is not None:
            return alone[0]
        whole: mx.array = super().__call__(x)
        return whole

    def product_kind(self) -> DenseKind | None:
        """The inputs that the kernel serves; None if it does not serve the weight."""
        weight, bias, checked = self["weight"], self.get("bias"), self._checked
        if checked is None or checked.weight is not weight or checked.bias is not bias:
            served = serves_dense(weight)
            if bias is not None:
                served = served and bias.dtype == weight.dtype and bias.shape == (weight.shape[0],)
            kind = DenseKind(weight.dtype, weight.shape[1]) if served else None
            checked = self._checked = _Checked(weight, bias, kind)
        return checked.kind


# MLX's classes are untyped here.
class StreamedEmbedding(nn.Embedding):  # type: ignore[misc]
    """An `Embedding` whose projection to logits computes a decode batch with the kernel."""

    def as_linear(self, x: mx.array) -> mx.array:
        weight: mx.array = self["weight"]
        shape = x.shape
        if _has_served_rows(shape) and serves_dense(weight) and (x.dtype, shape[2]) == (weight.dtype, weight.shape[1]):
            return dense_products(x, (weight,))[0]
        whole: mx.array = super().as_linear(x)
        return whole


def launch_dense(layers: Sequence[StreamedLinear], x: mx.array) -> list[mx.array] | None:
    """Returns the products of all `layers` with `x` from one launch, or None if the kernel does not serve them."""
    shape = x.shape
    if not _has_served_rows(shape):
        return None
    dtype, num_inner = x.dtype, shape[2]
    for layer in layers:
        kind = layer.product_kind()
        if kind is None or kind.num_inner != num_inner or kind.dtype != dtype:
            return None
    return dense_products(x, [layer["weight"] for layer in layers], [layer.get("bias") for layer in layers])


def _has_served_rows(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[1] == 1 and MIN_ROWS <= shape[0] <= MAX_ROWS

"""Makes quantized layers see a decode batch as the rows of one matrix.

`mx.quantized_matmul` on CUDA takes `[batch, 1, K]` for `batch` products of one row each and reads the weights for every
one of them; as `[1, batch, K]` it reads them once. Dense products are flattened by MLX itself.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from mlxcel_paged.models.layer_classes import turn_layers


# MLX's classes are untyped here.
class FlatQuantizedLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """A `QuantizedLinear` that computes `[batch, 1, K]` as `[1, batch, K]`."""

    def __call__(self, x: mx.array) -> mx.array:
        return _as_one_matrix(super().__call__, x)


class FlatQuantizedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """A `QuantizedEmbedding` whose projection to logits computes `[batch, 1, K]` as `[1, batch, K]`."""

    def as_linear(self, x: mx.array) -> mx.array:
        return _as_one_matrix(super().as_linear, x)


_FLAT = {nn.QuantizedLinear: FlatQuantizedLinear, nn.QuantizedEmbedding: FlatQuantizedEmbedding}


def flatten_quantized(model: nn.Module) -> int:
    """Turns the quantized layers of `model` into the classes above; see `turn_layers`."""
    return turn_layers(model, _FLAT)


def _as_one_matrix(product: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    shape = x.shape
    if len(shape) == 3 and shape[0] > 1 and shape[1] == 1:
        # Not by swapping axes: MLX's norms and products copy rows for the stride of the dimension of size one then.
        return product(x.reshape(1, shape[0], shape[2])).reshape(shape[0], 1, -1)
    return product(x)

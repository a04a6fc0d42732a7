"""Gives MLX's product of sorted experts rows that lie where it looks for them.

`mx.gather_mm(..., sorted_indices=True)` on CUDA (seen in mlx 0.32.4) takes the distance between rows from the stride of
`x`'s second last dimension. With one row an expert choice that dimension has size one, and its stride is whatever made
the array: `SwitchLinear` adds its bias as `[choices, 1, N]` with a stride of 1 there, and the sum is stored in the bias
if the product's own buffer is too large to be taken over. The product that reads the sum then sees rows one element
apart. So gpt_oss with dense experts answers to another prompt now and then, from 64 expert choices a pass on. Metal had
the same fault (ml-explore/mlx pull request 3960); quantized experts do not go this way.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from mlxcel_paged.models.layer_classes import turn_layers


# mlx-lm's classes are untyped here.
class RowStridedSwitchLinear(SwitchLinear):  # type: ignore[misc]
    """A `SwitchLinear` whose sorted product sees rows that are a row apart."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if sorted_indices:
            x = with_row_strides(x)
        output: mx.array = super().__call__(x, indices, sorted_indices=sorted_indices)
        return output


def with_row_strides(x: mx.array) -> mx.array:
    """`x` with the strides of its shape, also in dimensions of size one; a view where `x` is contiguous."""
    return x.flatten().reshape(x.shape)


def give_experts_row_strides(model: nn.Module) -> int:
    """Turns the dense expert layers of `model` into the class above; see `turn_layers`."""
    return turn_layers(model, {SwitchLinear: RowStridedSwitchLinear})

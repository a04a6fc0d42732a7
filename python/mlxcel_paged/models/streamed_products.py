"""Computes the products of a decode batch with a kernel that reads the weights once and costs the host little.

MLX hands a product of several rows to cuBLAS, as a graph of its own inside the step's: 16 us of host time against 6 us
for a kernel of ours (H200, 2026-11-29, mlx 0.32.4, 4 x 4096 x 4096), at the same time on the device. A decode step of
an 8B model has 225 of them and is bound by the host from two rows on.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxcel_paged.kernels_cuda.jit_header import jit_header

logger = logging.getLogger("mlxcel_paged")

# Of kernels/cuda/projection.cuh.
MAX_ROWS = 16
MIN_ROWS = 2  # MLX's own product of one row is as fast
_NUM_THREADS = 256
_TILE_ROWS = 8
_TILE_FEATURES = 16
_INNER_MULTIPLE = 64

# From here on two tiles of features a block are faster: fewer reads of the rows, and blocks enough all the same.
_MANY_FEATURES = 8192
_ELEMENTS = {mx.float16: "F16", mx.bfloat16: "Bf16"}


def serves(x: mx.array, weight: mx.array) -> bool:
    """Whether the kernel computes `x` `[rows, 1, inner]` times the transpose of `weight` `[features, inner]`."""
    return (
        x.ndim == 3
        and x.shape[1] == 1
        and MIN_ROWS <= x.shape[0] <= MAX_ROWS
        and x.dtype == weight.dtype
        and x.dtype in _ELEMENTS
        and weight.shape[0] % _TILE_FEATURES == 0
        and weight.shape[1] % _INNER_MULTIPLE == 0
    )


def streamed_product(x: mx.array, weight: mx.array) -> mx.array:
    """Returns `x` times the transpose of `weight`, `[rows, 1, features]`.

    A row has the same bits in every batch that the kernel serves.

    Args:
        x: `[rows, 1, inner]`, served by the kernel together with `weight`.
        weight: `[features, inner]`.
    """
    num_rows, num_features = x.shape[0], weight.shape[0]
    has_two_tiles = num_features >= _MANY_FEATURES and num_features % (2 * _TILE_FEATURES) == 0
    num_blocks = num_features // (_TILE_FEATURES * (2 if has_two_tiles else 1))
    outputs: list[mx.array] = _kernel(x.dtype, -(-num_rows // _TILE_ROWS))(
        inputs=[x, weight],
        output_shapes=[(num_rows, 1, num_features)],
        output_dtypes=[x.dtype],
        grid=(num_blocks * _NUM_THREADS, 1, 1),
        threadgroup=(_NUM_THREADS, 1, 1),
    )
    return outputs[0]


# MLX's classes are untyped here.
class StreamedLinear(nn.Linear):  # type: ignore[misc]
    """A `Linear` that computes a decode batch with the kernel."""

    def __call__(self, x: mx.array) -> mx.array:
        weight: mx.array = self["weight"]
        if serves(x, weight):
            product = streamed_product(x, weight)
            return product + self["bias"] if "bias" in self else product
        whole: mx.array = super().__call__(x)
        return whole


# MLX's classes are untyped here.
class StreamedEmbedding(nn.Embedding):  # type: ignore[misc]
    """An `Embedding` whose projection to logits computes a decode batch with the kernel."""

    def as_linear(self, x: mx.array) -> mx.array:
        weight: mx.array = self["weight"]
        if serves(x, weight):
            return streamed_product(x, weight)
        whole: mx.array = super().as_linear(x)
        return whole


_STREAMED = {nn.Linear: StreamedLinear, nn.Embedding: StreamedEmbedding}


def stream_products(model: nn.Module, dtype: mx.Dtype) -> int:
    """Turns the dense layers of `model` into the classes above, in place. Subclasses are left alone.

    Nothing is turned where MLX cannot compile the kernel, which takes seconds once a process and dtype.

    Returns:
        The layers that were turned; 0 the second time.
    """
    layers = [module for module in model.modules() if type(module) in _STREAMED]
    if not layers or dtype not in _ELEMENTS or not _compiles(dtype):
        return 0
    for module in layers:
        module.__class__ = _STREAMED[type(module)]
    return len(layers)


@cache
def _compiles(dtype: mx.Dtype) -> bool:
    started_at = time.perf_counter()
    weight = mx.zeros((_TILE_FEATURES, _INNER_MULTIPLE), dtype)
    try:
        for num_rows in (MIN_ROWS, MAX_ROWS):
            mx.eval(streamed_product(mx.zeros((num_rows, 1, _INNER_MULTIPLE), dtype), weight))
    except RuntimeError as error:
        logger.warning("MLX cannot compile the kernel for products, cuBLAS serves instead: %s", error)
        return False
    logger.info("compiled the kernel for products in %.1f s", time.perf_counter() - started_at)
    return True


@cache
def _kernel(dtype: mx.Dtype, row_tiles: int) -> Any:
    element = _ELEMENTS[dtype]
    return mx.fast.cuda_kernel(
        name=f"mlxcel_projection_{element}_{row_tiles}",
        input_names=["x", "w"],
        output_names=["y"],
        header=jit_header("projection.cuh", num_threads=_NUM_THREADS, min_blocks=2),
        # The text w_shape makes MLX pass the shape by value.
        source=f"""
  using mlxcel::u16;
  mlxcel::project_rows<mlxcel::{element}, {row_tiles}>(
      (const u16*)x, (const u16*)w, (u16*)y, x_shape[0], w_shape[0], w_shape[1]);
""",
        ensure_row_contiguous=True,
    )

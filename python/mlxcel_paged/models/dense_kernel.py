"""The kernel for products of a few rows with dense weights: what it serves, and its launch through MLX."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from mlxcel_paged.models.product_launch import (
    ELEMENTS,
    TILE_FEATURES,
    ProductLaunch,
    num_product_blocks,
    product_kernel,
)

logger = logging.getLogger("mlxcel_paged")

MIN_ROWS = 2  # MLX's own product of one row is as fast
_INNER_MULTIPLE = 64


def serves_dense(weight: mx.array) -> bool:
    """Whether the kernel computes with `weight`, `[features, inner]`."""
    return (
        weight.ndim == 2
        and weight.dtype in ELEMENTS
        and weight.shape[0] % TILE_FEATURES == 0
        and weight.shape[1] % _INNER_MULTIPLE == 0
    )


def dense_launch(weights: Sequence[mx.array], biases: Sequence[mx.array | None]) -> ProductLaunch:
    """Prepares the launch for weights that the kernel serves, of one inner size and dtype.

    A row has the same bits in every batch and beside whatever other weights; sums are float32 and rounded once.

    Args:
        weights: `[features, inner]` each.
        biases: `[features]` each, in the dtype of the weights, or None.
    """
    dtype, num_inner = weights[0].dtype, weights[0].shape[1]
    features = [weight.shape[0] for weight in weights]
    inputs = []
    for weight, bias in zip(weights, biases, strict=True):
        inputs += [weight] if bias is None else [weight, bias]
    kernel = _kernel(dtype, tuple(bias is not None for bias in biases))
    num_blocks = num_product_blocks(features)
    return ProductLaunch(kernel, inputs, features, num_inner, dtype, lambda _: num_blocks, ("dense", dtype, num_inner))


def dense_products(
    x: mx.array, weights: Sequence[mx.array], biases: Sequence[mx.array | None] = (None,)
) -> list[mx.array]:
    """Returns `x`, `[rows, 1, inner]`, times the transpose of each weight, plus its bias, from one launch.

    Args:
        x: 2 to 16 rows.
        weights, biases: As for `dense_launch`.
    """
    return dense_launch(weights, biases)(x, x.shape[0])


@cache
def dense_kernel_compiles(dtype: mx.Dtype) -> bool:
    """Whether MLX can compile and run the kernel for `dtype` here."""
    weight = mx.zeros((TILE_FEATURES, _INNER_MULTIPLE), dtype)
    try:
        mx.eval(dense_products(mx.zeros((MIN_ROWS, 1, _INNER_MULTIPLE), dtype), [weight]))
    except RuntimeError as error:
        logger.warning("MLX cannot compile the kernel for dense products, cuBLAS serves instead: %s", error)
        return False
    return True


@cache
def _kernel(dtype: mx.Dtype, has_bias: tuple[bool, ...]) -> Any:
    element = ELEMENTS[dtype]
    return product_kernel(
        f"mlxcel_projection_{element}",
        "projection.cuh",
        function=f"project_rows<mlxcel::{element}>",
        part="DensePart",
        arrays={"w": "const u16*"},
        has_bias=has_bias,
    )

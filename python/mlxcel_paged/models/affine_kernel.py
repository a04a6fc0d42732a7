"""The kernel for products of a few rows with weights in the affine layout of `mx.quantize`: what it serves, and its
launch through MLX.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from mlxcel_paged.models.product_launch import (
    ELEMENTS,
    TILE_FEATURES,
    TILE_ROWS,
    ProductLaunch,
    num_product_blocks,
    product_kernel,
)

logger = logging.getLogger("mlxcel_paged")

GROUP_SIZES = (32, 64, 128)
_DTYPES = {4: (mx.float16, mx.bfloat16), 8: (mx.float16,)}  # bfloat16 holds no integers above 256
_INNER_MULTIPLE = 256


@dataclass(frozen=True, slots=True, eq=False)
class AffineFormat:
    """How weights are quantized: the mode `affine` of `mx.quantize`, and the dtype of scales and activations.

    Made by `affine_format`: formats are compared as objects.
    """

    bits: int
    group_size: int
    dtype: mx.Dtype

    @property
    def is_served(self) -> bool:
        """Whether the kernel computes with such weights."""
        return self.group_size in GROUP_SIZES and self.dtype in _DTYPES.get(self.bits, ())

    @property
    def feature_multiple(self) -> int:
        """Features of a weight are a multiple of this."""
        return 2 * TILE_FEATURES if self.bits == 4 else TILE_FEATURES


@cache
def affine_format(bits: int, group_size: int, dtype: mx.Dtype) -> AffineFormat:
    """The one object that stands for this format."""
    return AffineFormat(bits, group_size, dtype)


@dataclass(frozen=True, slots=True)
class AffineWeight:
    """One quantized matrix and its bias.

    Attributes:
        words: `[features, inner * bits / 32]` uint32.
        scales: `[features, inner / group_size]`.
        offsets: Likewise; `mx.quantize` calls them biases.
        bias: `[features]`, or None.
    """

    words: mx.array
    scales: mx.array
    offsets: mx.array
    bias: mx.array | None = None


def serves_affine(weight: AffineWeight, form: AffineFormat) -> bool:
    """Whether the kernel computes with `weight`, which is in `form`."""
    words = weight.words
    if not form.is_served or words.ndim != 2 or words.dtype != mx.uint32:
        return False
    num_features, num_inner = words.shape[0], words.shape[1] * 32 // form.bits
    scales_shape = (num_features, num_inner // form.group_size)
    return (
        num_features % form.feature_multiple == 0
        and num_inner % _INNER_MULTIPLE == 0
        and weight.scales.shape == weight.offsets.shape == scales_shape
        and weight.scales.dtype == weight.offsets.dtype == form.dtype
    )


def affine_launch(weights: Sequence[AffineWeight], form: AffineFormat) -> ProductLaunch:
    """Prepares the launch for weights that the kernel serves, of one inner size and all in `form`.

    Values are scaled in float32, so that results are as those of exact weights, rounded once. A row has the same bits
    in every batch and beside whatever other weights.
    """
    num_inner = weights[0].words.shape[1] * 32 // form.bits
    features = [weight.words.shape[0] for weight in weights]
    inputs = []
    for weight in weights:
        inputs += [weight.words, weight.scales, weight.offsets]
        if weight.bias is not None:
            inputs.append(weight.bias)
    kernel = _kernel(form, tuple(weight.bias is not None for weight in weights))
    kind = ("affine", form, num_inner)
    return ProductLaunch(
        kernel, inputs, features, num_inner, form.dtype, lambda num_rows: _num_blocks(features, num_rows, form), kind
    )


def affine_products(x: mx.array, weights: Sequence[AffineWeight], form: AffineFormat) -> list[mx.array]:
    """Returns `x`, `[rows, 1, inner]`, times the transpose of each weight, plus its bias, from one launch.

    Args:
        x: 1 to 16 rows in the format's dtype.
        weights, form: As for `affine_launch`.
    """
    return affine_launch(weights, form)(x, x.shape[0])


def _num_blocks(features: Sequence[int], num_rows: int, form: AffineFormat) -> int:
    """As `project_affine_rows` in kernels/cuda wants it."""
    num_tiles = sum(features) // TILE_FEATURES
    if form.bits == 8:
        return num_tiles
    return num_tiles // 2 if num_rows > TILE_ROWS else num_product_blocks(features)


@cache
def affine_kernel_compiles(form: AffineFormat) -> bool:
    """Whether MLX can compile and run the kernel for `form`, which it must serve, here."""
    num_features, num_groups = form.feature_multiple, _INNER_MULTIPLE // form.group_size
    scales = mx.zeros((num_features, num_groups), form.dtype)
    weight = AffineWeight(mx.zeros((num_features, _INNER_MULTIPLE * form.bits // 32), mx.uint32), scales, scales)
    try:
        mx.eval(affine_products(mx.zeros((1, 1, _INNER_MULTIPLE), form.dtype), [weight], form))
    except RuntimeError as error:
        logger.warning("MLX cannot compile the kernel for quantized products, its own serves instead: %s", error)
        return False
    return True


@cache
def _kernel(form: AffineFormat, has_bias: tuple[bool, ...]) -> Any:
    element = ELEMENTS[form.dtype]
    return product_kernel(
        f"mlxcel_projection_affine_{element}_{form.bits}_{form.group_size}",
        "projection_affine.cuh",
        function=f"project_affine_rows<mlxcel::{element}, {form.bits}, {form.group_size}>",
        part="AffinePart",
        arrays={"w": "const mlxcel::u32*", "s": "const u16*", "o": "const u16*"},
        has_bias=has_bias,
    )

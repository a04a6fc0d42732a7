"""Weights, rows and the measure of what tests of products compare."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_paged.models.affine_kernel import AffineFormat, AffineWeight

# Of the largest value: rounding of the result, and of sums in float32 along any order.
TOLERANCES = {mx.float16: 2**-10, mx.bfloat16: 2**-7}


def float64(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def bits_of(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.view(mx.uint16))


def same_within(found: mx.array, wanted: np.ndarray[Any, Any]) -> None:
    """Compares `[rows, 1, features]` with `[rows, features]`."""
    difference = np.abs(float64(found)[:, 0] - wanted).max()
    assert difference <= TOLERANCES[found.dtype] * np.abs(wanted).max()


def poisoned_around(array: mx.array) -> mx.array:
    """The same values inside a larger array, between NaN: a kernel that reads its neighbours shows it."""
    poison = mx.full((1, *array.shape[1:]) if array.ndim > 1 else (16,), float("nan"), array.dtype)
    begin = poison.shape[0]
    whole = mx.concatenate([poison, array, poison])
    mx.eval(whole)
    return whole[begin : begin + array.shape[0]]


def quantized(num_features: int, num_inner: int, form: AffineFormat) -> tuple[AffineWeight, np.ndarray[Any, Any]]:
    """Random weights in `form`, and their exact values in float64."""
    dense = mx.random.normal((num_features, num_inner)).astype(form.dtype)
    words, scales, offsets = mx.quantize(dense, group_size=form.group_size, bits=form.bits)
    shifts = np.arange(0, 32, form.bits, dtype=np.uint32)
    values = (np.array(words)[..., None] >> shifts & (2**form.bits - 1)).reshape(num_features, -1, form.group_size)
    exact = values * float64(scales)[..., None] + float64(offsets)[..., None]
    poison = mx.full((1, words.shape[1]), 0xFFFFFFFF, mx.uint32)
    words = mx.concatenate([poison, words, poison])[1 : 1 + num_features]
    weight = AffineWeight(words, poisoned_around(scales), poisoned_around(offsets))
    return weight, exact.reshape(num_features, num_inner)

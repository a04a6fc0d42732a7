"""Doubles of the kernels for products: MLX computes in their place, and every launch is noted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import pytest

from mlxcel_paged.models import streamed_dense, streamed_products, streamed_quantized
from mlxcel_paged.models.affine_kernel import AffineFormat, AffineWeight, serves_affine
from mlxcel_paged.models.dense_kernel import MIN_ROWS, serves_dense
from mlxcel_paged.models.product_grid import MAX_PARTS, MAX_ROWS


@dataclass(slots=True)
class Launches:
    """Features of the matrices of every launch, in order."""

    dense: list[list[int]] = field(default_factory=list)
    quantized: list[list[int]] = field(default_factory=list)

    def clear(self) -> None:
        self.dense.clear()
        self.quantized.clear()

    def dense_products(
        self, x: mx.array, weights: Sequence[mx.array], biases: Sequence[mx.array | None] = (None,)
    ) -> list[mx.array]:
        _check_rows(x, MIN_ROWS, len(weights))
        self.dense.append([weight.shape[0] for weight in weights])
        outputs = []
        for weight, bias in zip(weights, biases, strict=True):
            assert serves_dense(weight)
            assert (x.dtype, x.shape[2]) == (weight.dtype, weight.shape[1])
            assert bias is None or (bias.dtype, bias.shape) == (x.dtype, weight.shape[:1])
            outputs.append(x @ weight.T if bias is None else mx.addmm(bias, x, weight.T))
        return outputs

    def affine_products(self, x: mx.array, weights: Sequence[AffineWeight], form: AffineFormat) -> list[mx.array]:
        _check_rows(x, 1, len(weights))
        self.quantized.append([weight.words.shape[0] for weight in weights])
        outputs = []
        for weight in weights:
            assert serves_affine(weight, form)
            assert x.dtype == form.dtype
            parts = (weight.words, weight.scales, weight.offsets)
            product = mx.quantized_matmul(x, *parts, group_size=form.group_size, bits=form.bits)
            outputs.append(product if weight.bias is None else product + weight.bias)
        return outputs


def _check_rows(x: mx.array, min_rows: int, num_parts: int) -> None:
    assert x.ndim == 3
    assert x.shape[1] == 1
    assert min_rows <= x.shape[0] <= MAX_ROWS
    assert 1 <= num_parts <= MAX_PARTS


def install_doubles(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Puts the doubles in the place of the kernels."""
    launches = Launches()
    monkeypatch.setattr(streamed_dense, "dense_products", launches.dense_products)
    monkeypatch.setattr(streamed_quantized, "affine_products", launches.affine_products)
    monkeypatch.setattr(streamed_products, "dense_kernel_compiles", lambda dtype: True)
    monkeypatch.setattr(streamed_products, "affine_kernel_compiles", lambda form: True)
    return launches

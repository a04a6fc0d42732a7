"""Doubles of the kernels for products: MLX computes in their place, and every launch is noted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from mlxcel_paged.models import streamed_dense, streamed_products, streamed_quantized
from mlxcel_paged.models.affine_kernel import AffineFormat, AffineWeight, serves_affine
from mlxcel_paged.models.dense_kernel import MIN_ROWS, serves_dense
from mlxcel_paged.models.product_launch import MAX_PARTS, MAX_ROWS, ProductLaunch


@dataclass(slots=True)
class Launches:
    """Features of the matrices of every launch, in order."""

    dense: list[list[int]] = field(default_factory=list)
    quantized: list[list[int]] = field(default_factory=list)

    def clear(self) -> None:
        self.dense.clear()
        self.quantized.clear()

    def dense_launch(self, weights: Sequence[mx.array], biases: Sequence[mx.array | None]) -> ProductLaunch:
        dtype, num_inner = weights[0].dtype, weights[0].shape[1]
        for weight, bias in zip(weights, biases, strict=True):
            assert serves_dense(weight)
            assert (weight.dtype, weight.shape[1]) == (dtype, num_inner)
            assert bias is None or (bias.dtype, bias.shape) == (dtype, weight.shape[:1])
        features = [weight.shape[0] for weight in weights]

        def kernel(inputs: list[mx.array], output_shapes: list[tuple[int, ...]], **_: Any) -> list[mx.array]:
            x = _checked(inputs[0], (dtype, num_inner), output_shapes, features, MIN_ROWS)
            self.dense.append(features)
            parts = zip(weights, biases, strict=True)
            return [x @ weight.T if bias is None else mx.addmm(bias, x, weight.T) for weight, bias in parts]

        return ProductLaunch(kernel, [], features, num_inner, dtype, lambda _: 1, ("dense", dtype, num_inner))

    def affine_launch(self, weights: Sequence[AffineWeight], form: AffineFormat) -> ProductLaunch:
        num_inner = weights[0].words.shape[1] * 32 // form.bits
        assert all(serves_affine(weight, form) for weight in weights)
        features = [weight.words.shape[0] for weight in weights]

        def kernel(inputs: list[mx.array], output_shapes: list[tuple[int, ...]], **_: Any) -> list[mx.array]:
            x = _checked(inputs[0], (form.dtype, num_inner), output_shapes, features, 1)
            self.quantized.append(features)
            outputs = []
            for weight in weights:
                parts = (weight.words, weight.scales, weight.offsets)
                product = mx.quantized_matmul(x, *parts, group_size=form.group_size, bits=form.bits)
                outputs.append(product if weight.bias is None else product + weight.bias)
            return outputs

        return ProductLaunch(kernel, [], features, num_inner, form.dtype, lambda _: 1, ("affine", form, num_inner))


def _checked(
    x: mx.array,
    wanted: tuple[mx.Dtype, int],
    output_shapes: list[tuple[int, ...]],
    features: list[int],
    min_rows: int,
) -> mx.array:
    assert x.ndim == 3
    assert x.shape[1] == 1
    assert min_rows <= x.shape[0] <= MAX_ROWS
    assert (x.dtype, x.shape[2]) == wanted
    assert 1 <= len(features) <= MAX_PARTS
    assert output_shapes == [(x.shape[0], 1, count) for count in features]
    return x


def install_doubles(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Puts the doubles in the place of the kernels."""
    launches = Launches()
    monkeypatch.setattr(streamed_dense, "dense_launch", launches.dense_launch)
    monkeypatch.setattr(streamed_quantized, "affine_launch", launches.affine_launch)
    monkeypatch.setattr(streamed_products, "dense_kernel_compiles", lambda dtype: True)
    monkeypatch.setattr(streamed_products, "affine_kernel_compiles", lambda form: True)
    return launches

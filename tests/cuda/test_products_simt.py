"""The kernels for products compute right, lane by lane on the host, in the forms of each architecture.

Without the GPU's rounding inside tensor cores, speed and memory model; those are for test_products_gpu.py.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from products_case import TOLERANCES, bits_of, float64, quantized, same_within
from simt_products import SimtKernel, build

from mlxcel_paged.models import affine_kernel, dense_kernel
from mlxcel_paged.models.affine_kernel import AffineWeight, affine_format, affine_products
from mlxcel_paged.models.dense_kernel import dense_products

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for Linux")

FORMATS = [(4, group_size, dtype) for group_size in (32, 64, 128) for dtype in TOLERANCES]
FORMATS += [(8, group_size, mx.float16) for group_size in (32, 64, 128)]


@pytest.fixture(scope="module", params=[900, 800], ids=["sm_90", "others"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Ten seconds each."""
    return build(tmp_path_factory.mktemp("simt"), request.param)


@pytest.fixture(autouse=True)
def kernels(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Any:
    def cuda_kernel(*, name: str, input_names: list[str], output_names: list[str], **_: Any) -> SimtKernel:
        return SimtKernel(library, name, input_names, output_names)

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    for module in (dense_kernel, affine_kernel):
        module._kernel.cache_clear()
    yield
    for module in (dense_kernel, affine_kernel):
        module._kernel.cache_clear()


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_dense_products(dtype: mx.Dtype) -> None:
    mx.random.seed(1)
    # More chunks of 64 than a turn of eight warps takes at once, and not a multiple.
    weights = [mx.random.normal((count, 64 * 37)).astype(dtype) for count in (32, 16, 48)]
    biases = [16 * mx.random.normal((32,)).astype(dtype), None, mx.random.normal((48,)).astype(dtype)]
    rows = mx.random.normal((16, 1, 64 * 37)).astype(dtype)
    whole = [bits_of(found) for found in dense_products(rows, weights, biases)]
    for num_rows in (1, 8, 11):
        for index, found in enumerate(dense_products(rows[:num_rows], weights, biases)):
            bias = biases[index]
            wanted = float64(rows[:num_rows])[:, 0] @ float64(weights[index]).T
            same_within(found, wanted + (0 if bias is None else float64(bias)))
            assert np.array_equal(bits_of(found), whole[index][:num_rows])
            assert np.array_equal(bits_of(found), bits_of(dense_products(rows[:num_rows], [weights[index]], [bias])[0]))


def test_dense_products_with_two_tiles_of_features_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    mx.random.seed(2)
    weights = [mx.random.normal((count, 192)).astype(mx.float16) for count in (64, 32)]
    for num_rows in (3, 12):
        rows = mx.random.normal((num_rows, 1, 192)).astype(mx.float16)
        single_tiles = [bits_of(found) for found in dense_products(rows, weights, [None, None])]
        with monkeypatch.context() as patch:
            patch.setattr("mlxcel_paged.models.product_launch._MANY_FEATURES", 0)
            pairs = dense_products(rows, weights, [None, None])
        for found, same, weight in zip(pairs, single_tiles, weights, strict=True):
            assert np.array_equal(bits_of(found), same)
            same_within(found, float64(rows)[:, 0] @ float64(weight).T)


@pytest.mark.parametrize(("bits", "group_size", "dtype"), FORMATS)
def test_quantized_products(monkeypatch: pytest.MonkeyPatch, bits: int, group_size: int, dtype: mx.Dtype) -> None:
    mx.random.seed(group_size)
    form = affine_format(bits, group_size, dtype)
    # More blocks of 256 than warps.
    pairs = [quantized(count, 256 * 9, form) for count in (32, 64)]
    bias = mx.random.normal((64,)).astype(dtype)
    second = pairs[1][0]
    weights = [pairs[0][0], AffineWeight(second.words, second.scales, second.offsets, bias)]
    wanted_bias = [0.0, float64(bias)]
    rows = mx.random.normal((16, 1, 256 * 9)).astype(dtype)
    whole = [bits_of(found) for found in affine_products(rows, weights, form)]
    for num_rows, many_features in ((1, 6144), (3, 0), (8, 6144), (9, 6144)):
        with monkeypatch.context() as patch:
            patch.setattr("mlxcel_paged.models.product_launch._MANY_FEATURES", many_features)
            outputs = affine_products(rows[:num_rows], weights, form)
        for index, found in enumerate(outputs):
            same_within(found, float64(rows[:num_rows])[:, 0] @ pairs[index][1].T + wanted_bias[index])
            assert np.array_equal(bits_of(found), whole[index][:num_rows]), "the order of sums depends on the form"


@pytest.mark.parametrize("many_features", [0, 6144])
@pytest.mark.parametrize("shift", [1, 4])
def test_a_single_row_may_begin_anywhere(monkeypatch: pytest.MonkeyPatch, shift: int, many_features: int) -> None:
    form = affine_format(4, 64, mx.float16)
    weight, exact = quantized(64, 512, form)
    row = mx.random.normal((1, 1, 512)).astype(mx.float16)
    aligned = bits_of(affine_products(row, [weight], form)[0])
    monkeypatch.setattr(SimtKernel, "x_shift", shift)
    monkeypatch.setattr("mlxcel_paged.models.product_launch._MANY_FEATURES", many_features)
    (found,) = affine_products(row, [weight], form)
    same_within(found, float64(row)[:, 0] @ exact.T)
    assert np.array_equal(bits_of(found), aligned)

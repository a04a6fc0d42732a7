"""Products of a few rows through MLX on a real GPU, against float64. Skipped without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

if not mx.cuda.is_available():
    pytest.skip("needs a CUDA GPU and MLX's CUDA backend", allow_module_level=True)

from products_case import TOLERANCES, bits_of, float64, poisoned_around, quantized, same_within

from mlxcel_paged.models.affine_kernel import AffineWeight, affine_format, affine_products
from mlxcel_paged.models.dense_kernel import MIN_ROWS, dense_products
from mlxcel_paged.models.product_launch import MAX_ROWS
from mlxcel_paged.models.siblings import join_siblings
from mlxcel_paged.models.streamed_dense import StreamedEmbedding, StreamedLinear, dense_layers_launch
from mlxcel_paged.models.streamed_products import stream_products
from mlxcel_paged.models.streamed_quantized import StreamedQuantizedEmbedding, StreamedQuantizedLinear

FORMATS = [(4, 32, mx.float16), (4, 64, mx.float16), (4, 128, mx.float16), (4, 32, mx.bfloat16), (4, 64, mx.bfloat16)]
FORMATS += [(4, 128, mx.bfloat16), (8, 32, mx.float16), (8, 64, mx.float16), (8, 128, mx.float16)]


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(
    ("num_features", "num_inner"),
    [(16, 64), (48, 128), (96, 4096), (4096, 64), (4128, 1024), (65552, 192), (65568, 192), (576, 1536)],
)
def test_every_number_of_rows(num_features: int, num_inner: int, dtype: mx.Dtype) -> None:
    mx.random.seed(num_features + num_inner)
    weight = poisoned_around(mx.random.normal((num_features, num_inner)).astype(dtype))
    bias = poisoned_around(16 * mx.random.normal((num_features,)).astype(dtype))
    rows = mx.random.normal((MAX_ROWS, 1, num_inner)).astype(dtype)
    wanted = float64(rows)[:, 0] @ float64(weight).T
    whole = bits_of(dense_products(rows, [weight])[0])
    whole_biased = bits_of(dense_products(rows, [weight], [bias])[0])
    for num_rows in range(MIN_ROWS, MAX_ROWS + 1):
        x = poisoned_around(rows[:num_rows])
        (found,) = dense_products(x, [weight])
        assert found.shape == (num_rows, 1, num_features)
        same_within(found, wanted[:num_rows])
        assert np.array_equal(bits_of(found), whole[:num_rows]), "a row depends on its neighbours"
        (biased,) = dense_products(x, [weight], [bias])
        same_within(biased, wanted[:num_rows] + float64(bias))
        assert np.array_equal(bits_of(biased), whole_biased[:num_rows])


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_a_bias_is_added_before_rounding(dtype: mx.Dtype) -> None:
    """The product is a unit in the last place and a bit above a value that is even: rounded before the bias takes it
    away, nothing would be left of the bit."""
    ulp = 2.0 ** (-10 if dtype == mx.float16 else -7)
    weight = mx.zeros((16, 64), mx.float32)
    weight[:, 0], weight[:, 1] = 1.0, ulp / 4
    (found,) = dense_products(mx.ones((2, 1, 64), dtype), [weight.astype(dtype)], [mx.full((16,), -1.0, dtype)])
    assert np.all(float64(found) == ulp / 4)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("features", [(16, 48), (32, 96, 64), (4096, 1024, 1024), (6144, 6144), (16, 65536)])
def test_siblings_have_the_bits_of_single_launches(features: tuple[int, ...], dtype: mx.Dtype) -> None:
    mx.random.seed(sum(features))
    weights = [poisoned_around(mx.random.normal((count, 320)).astype(dtype)) for count in features]
    biases = [None, *(mx.random.normal((count,)).astype(dtype) for count in features[1:])]
    for num_rows in (2, 7, 8, 9, 16):
        x = mx.random.normal((num_rows, 1, 320)).astype(dtype)
        together = dense_products(x, weights, biases)
        for found, weight, bias in zip(together, weights, biases, strict=True):
            assert np.array_equal(bits_of(found), bits_of(dense_products(x, [weight], [bias])[0]))
            wanted = float64(x)[:, 0] @ float64(weight).T + (0 if bias is None else float64(bias))
            same_within(found, wanted)


def test_rows_that_lie_apart_are_served() -> None:
    weight = mx.random.normal((32, 64)).astype(mx.float16)
    rows = mx.random.normal((4, 3, 64)).astype(mx.float16)[:, 1:2]
    same_within(dense_products(rows, [weight])[0], float64(rows)[:, 0] @ float64(weight).T)


@pytest.mark.parametrize(("bits", "group_size", "dtype"), FORMATS)
@pytest.mark.parametrize(("num_features", "num_inner"), [(32, 256), (96, 4096), (6176, 768), (1056, 2304)])
def test_quantized_weights(num_features: int, num_inner: int, bits: int, group_size: int, dtype: mx.Dtype) -> None:
    mx.random.seed(num_features + num_inner)
    form = affine_format(bits, group_size, dtype)
    weight, exact = quantized(num_features, num_inner, form)
    bias = poisoned_around(mx.random.normal((num_features,)).astype(dtype))
    weight = AffineWeight(weight.words, weight.scales, weight.offsets, bias)
    rows = mx.random.normal((MAX_ROWS, 1, num_inner)).astype(dtype)
    wanted = float64(rows)[:, 0] @ exact.T + float64(bias)
    whole = bits_of(affine_products(rows, [weight], form)[0])
    for num_rows in range(1, MAX_ROWS + 1):
        (found,) = affine_products(poisoned_around(rows[:num_rows]), [weight], form)
        assert found.shape == (num_rows, 1, num_features)
        same_within(found, wanted[:num_rows])
        assert np.array_equal(bits_of(found), whole[:num_rows]), "a row depends on its neighbours"


@pytest.mark.parametrize(
    ("bits", "group_size", "dtype"), [(4, 64, mx.float16), (4, 128, mx.bfloat16), (8, 64, mx.float16)]
)
@pytest.mark.parametrize("features", [(64, 32), (96, 64, 32), (4096, 1024, 1024)])
def test_quantized_siblings(features: tuple[int, ...], bits: int, group_size: int, dtype: mx.Dtype) -> None:
    mx.random.seed(sum(features))
    form = affine_format(bits, group_size, dtype)
    pairs = [quantized(count, 768, form) for count in features]
    for num_rows in (1, 2, 8, 9, 16):
        x = mx.random.normal((num_rows, 1, 768)).astype(dtype)
        together = affine_products(x, [weight for weight, _ in pairs], form)
        for found, (weight, exact) in zip(together, pairs, strict=True):
            same_within(found, float64(x)[:, 0] @ exact.T)
            assert np.array_equal(bits_of(found), bits_of(affine_products(x, [weight], form)[0]))


@pytest.mark.parametrize("begin", [1, 2, 3, 8])
def test_a_single_row_may_begin_anywhere(begin: int) -> None:
    form = affine_format(4, 64, mx.float16)
    long = mx.random.normal((1, 1, 512)).astype(mx.float16)
    for num_features in (64, 6144):
        weight, exact = quantized(num_features, 256, form)
        x = long[:, :, begin : begin + 256]
        same_within(affine_products(x, [weight], form)[0], float64(x)[:, 0] @ exact.T)


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(256, 64, bias=False)
        self.biased = nn.Linear(256, 48)
        self.odd = nn.Linear(100, 24)
        self.embedding = nn.Embedding(32, 256)
        self.quantized = nn.QuantizedLinear(256, 64)
        self.narrow = nn.QuantizedLinear(256, 24)
        self.table = nn.QuantizedEmbedding(64, 256)

    def __call__(self, tokens: mx.array, cache: object) -> mx.array:
        return self.products(self.embedding(tokens))[1]

    def products(self, x: mx.array) -> list[mx.array]:
        return [
            *(self.plain(x), self.biased(x), self.odd(x[..., :100]), self.embedding.as_linear(x)),
            *(self.quantized(x), self.narrow(x), self.table.as_linear(x)),
        ]


def test_layers_are_turned_once_and_compute_the_same() -> None:
    model = Model()
    model.set_dtype(mx.float16)
    inputs = [mx.random.normal(shape).astype(mx.float16) for shape in ((5, 1, 256), (1, 1, 256), (1, 70, 256))]
    wanted = [model.products(x) for x in inputs]
    assert stream_products(model, mx.float16, 0) == 7
    assert stream_products(model, mx.float16, 0) == 0
    assert isinstance(model.biased, StreamedLinear)
    assert isinstance(model.embedding, StreamedEmbedding)
    assert isinstance(model.quantized, StreamedQuantizedLinear)
    assert isinstance(model.table, StreamedQuantizedEmbedding)
    assert model.plain.siblings is model.biased.siblings is not None
    for x, products in zip(inputs, wanted, strict=True):
        for left, right in zip(products, model.products(x), strict=True):
            assert left.shape == right.shape
            assert float(mx.abs(left - right).max()) <= 1e-2 * float(mx.abs(left).max())


def test_siblings_of_a_model_launch_once() -> None:
    model = Model()
    model.set_dtype(mx.float16)
    stream_products(model, mx.float16, 0)
    launches: list[int] = []

    def counted(layers: Sequence[nn.Module]) -> Callable[[mx.array], list[mx.array] | None]:
        launch = dense_layers_launch(layers)

        def run(x: mx.array) -> list[mx.array] | None:
            launches.append(len(layers))
            return launch(x)

        return run

    assert join_siblings(model, 0, [model.plain, model.biased], counted) == 2
    launches.clear()
    x = mx.random.normal((3, 1, 256)).astype(mx.float16)
    found = [model.plain(x), model.biased(x)]
    assert launches == [2]
    for output, layer in zip(found, (model.plain, model.biased), strict=True):
        wanted = float64(x)[:, 0] @ float64(layer.weight).T
        same_within(output, wanted + (float64(layer.bias) if "bias" in layer else 0))

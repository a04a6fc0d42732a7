"""Products of a few rows through MLX on a real GPU, against float64. Skipped without one."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

if not mx.cuda.is_available():
    pytest.skip("needs a CUDA GPU and MLX's CUDA backend", allow_module_level=True)

from mlxcel_paged.models.streamed_products import (
    MAX_ROWS,
    StreamedEmbedding,
    StreamedLinear,
    stream_products,
    streamed_product,
)

# Of the largest value: rounding of the result, and of sums in float32 along any order.
TOLERANCES = {mx.float16: 2**-10, mx.bfloat16: 2**-7}


def float64(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32)).astype(np.float64)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(
    ("num_features", "num_inner"),
    [(16, 64), (48, 128), (96, 4096), (4096, 64), (4128, 1024), (65536, 192), (576, 1536)],
)
def test_every_number_of_rows(num_features: int, num_inner: int, dtype: mx.Dtype) -> None:
    mx.random.seed(num_features + num_inner)
    weight = mx.random.normal((num_features, num_inner)).astype(dtype)
    rows = mx.random.normal((MAX_ROWS, 1, num_inner)).astype(dtype)
    wanted = float64(rows)[:, 0] @ float64(weight).T
    whole = np.array(streamed_product(rows, weight).view(mx.uint16))
    for num_rows in range(1, MAX_ROWS + 1):
        found = streamed_product(rows[:num_rows], weight)
        assert found.shape == (num_rows, 1, num_features)
        difference = np.abs(float64(found)[:, 0] - wanted[:num_rows]).max()
        assert difference <= TOLERANCES[dtype] * np.abs(wanted[:num_rows]).max()
        assert np.array_equal(np.array(found.view(mx.uint16)), whole[:num_rows]), "a row depends on its neighbours"


def test_rows_that_lie_apart_are_served() -> None:
    weight = mx.random.normal((32, 64)).astype(mx.float16)
    rows = mx.random.normal((4, 3, 64)).astype(mx.float16)[:, 1:2]
    difference = mx.abs(streamed_product(rows, weight) - rows @ weight.T).max()
    assert float(difference) <= 2e-2


def test_layers_are_turned_once_and_compute_the_same() -> None:
    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Linear(128, 64, bias=False)
            self.biased = nn.Linear(128, 48)
            self.odd = nn.Linear(100, 24)
            self.embedding = nn.Embedding(32, 128)
            self.quantized = nn.QuantizedLinear(128, 64)

    model = Model()
    model.set_dtype(mx.float16)
    x = {size: mx.random.normal((5, 1, size)).astype(mx.float16) for size in (100, 128)}
    wanted = [model.plain(x[128]), model.biased(x[128]), model.odd(x[100]), model.embedding.as_linear(x[128])]
    assert stream_products(model, mx.float16) == 4
    assert stream_products(model, mx.float16) == 0
    assert type(model.quantized) is nn.QuantizedLinear
    assert isinstance(model.biased, StreamedLinear)
    assert isinstance(model.embedding, StreamedEmbedding)
    found = [model.plain(x[128]), model.biased(x[128]), model.odd(x[100]), model.embedding.as_linear(x[128])]
    for left, right in zip(wanted, found, strict=True):
        assert float(mx.abs(left - right).max()) <= 1e-2 * float(mx.abs(left).max())
    long = mx.random.normal((1, 70, 128)).astype(mx.float16)
    assert model.plain(long).shape == (1, 70, 64)

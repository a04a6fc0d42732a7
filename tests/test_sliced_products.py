"""Matrix products that are cut into slices, and those just below and above the sizes where they are."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

# More rows than columns, more columns than rows, slices that do not divide them, and products that stay whole.
SIZES = [(1500, 200, 300), (200, 1500, 300), (1001, 999, 333), (17, 4097, 576), (700, 33, 1000), (17, 18, 19)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("is_a_transposed", [False, True])
@pytest.mark.parametrize("is_b_transposed", [False, True])
def test_product_equals_float64(size: tuple[int, int, int], is_a_transposed: bool, is_b_transposed: bool) -> None:
    m, n, k = size
    rng = np.random.default_rng(m + n + k)
    a = rng.standard_normal((k, m) if is_a_transposed else (m, k), np.float32)
    b = rng.standard_normal((n, k) if is_b_transposed else (k, n), np.float32)
    left, right = (
        array.T if flag else array for array, flag in ((mx.array(a), is_a_transposed), (mx.array(b), is_b_transposed))
    )
    with mx.stream(mx.cpu):
        product = np.array(left @ right)
    expected = (a.T if is_a_transposed else a).astype(np.float64) @ (b.T if is_b_transposed else b)
    assert np.abs(product - expected).max() <= 1e-5 * k


def test_product_with_a_bias_adds_it_once() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((600, 400), np.float32), rng.standard_normal((400, 900), np.float32)
    bias = rng.standard_normal((600, 900), np.float32)
    with mx.stream(mx.cpu):
        result = np.array(mx.addmm(mx.array(bias), mx.array(a), mx.array(b)))
    assert np.abs(result - (bias + a.astype(np.float64) @ b)).max() <= 4e-3

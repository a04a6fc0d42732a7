"""The stride of an axis of size one means nothing, and arrays carry all kinds of it.

The fault class: MLX leaves a stride of 1 where `expand_dims` made the axis and another where the axis came with the
array, so code that compares or trusts all strides takes equal arrays for different ones.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_paged.attention.plan_api import plan_from_csr

PAGE_SIZE, HEAD_DIM = 8, 64


def strides(array: mx.array) -> list[int]:
    mx.eval(array)
    return [stride // array.itemsize for stride in memoryview(array).strides]  # type: ignore[arg-type, union-attr]


def one_row(backend: str, num_pages: int = 1) -> Any:
    return plan_from_csr(
        [0, 1], [0], [5], num_pages=num_pages, page_size=PAGE_SIZE, num_qo_heads=1, num_kv_heads=1, head_dim=HEAD_DIM,
        backend=backend,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_one_row_of_one_head_in_one_page(backend: str) -> None:
    """Every axis but the tokens' has size one."""
    random = mx.random.split(mx.random.key(3), 5)
    k, v = (mx.random.normal((PAGE_SIZE, HEAD_DIM), key=key) for key in random[:2])
    q, k_new, v_new = (mx.random.normal((HEAD_DIM,), key=key) for key in random[2:])
    found = []
    for lay_out in (lambda array, shape: array.flatten().reshape(shape), unit_strides):
        pools = [lay_out(mx.array(np.array(pool)), (1, PAGE_SIZE, 1, HEAD_DIM)) for pool in (k, v)]
        rows = [lay_out(row, (1, 1, HEAD_DIM)) for row in (q, k_new, v_new)]
        assert {strides(rows[0])[0], strides(pools[0])[2]} == ({1} if lay_out is unit_strides else {HEAD_DIM})
        out = one_row(backend).run(rows[0], *pools, k_new=rows[1], v_new=rows[2])
        found.append([np.array(array) for array in (out, *pools)])
        assert np.array_equal(np.array(pools[0])[0, 4, 0], np.array(k_new))
    for plain, odd in zip(*found, strict=True):
        np.testing.assert_allclose(odd, plain, rtol=1e-6)


def unit_strides(array: mx.array, shape: tuple[int, ...]) -> mx.array:
    """`array` in `shape`, in which axes of size one have the stride 1."""
    return mx.expand_dims(array, [axis for axis, size in enumerate(shape) if size == 1])


def test_keys_and_values_that_interleave_in_one_buffer() -> None:
    """They differ in nothing but the stride of the only head, so they share no element."""
    both = mx.random.normal((2, PAGE_SIZE, 2, HEAD_DIM), key=mx.random.key(3))
    mx.eval(both)
    k_pages, v_pages = mx.expand_dims(both[:, :, 0], 2), both[:, :, 1:]
    assert [left == right for left, right in zip(strides(k_pages), strides(v_pages), strict=True)] == [1, 1, 0, 1]
    new = [mx.random.normal((1, 1, HEAD_DIM), key=mx.random.key(key)) for key in (4, 5)]
    one_row("cpu", 2).run(mx.ones((1, 1, HEAD_DIM)), k_pages, v_pages, k_new=new[0], v_new=new[1])
    written = np.array(both)[0, 4]
    np.testing.assert_array_equal(written, np.stack([np.array(row)[0, 0] for row in new]))

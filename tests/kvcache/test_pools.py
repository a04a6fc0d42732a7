"""Pools are allocated once, start as zeros, and copy whole pages."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_paged.kvcache.layout import KVGroup, KVLayout
from mlxcel_paged.kvcache.pool_memory import prepare_zeroed
from mlxcel_paged.kvcache.pools import KVPools


def layout(dtype: mx.Dtype = mx.float32) -> KVLayout:
    full = KVGroup(0, (0, 2), 4, 2, 64, None, False, 0.0)
    sliding = KVGroup(1, (1,), 4, 1, 32, 24, False, 0.0)
    return KVLayout((full, sliding), (0, 1, 0), dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_shapes_sizes_and_zeros(dtype: mx.Dtype) -> None:
    pools = KVPools(layout(dtype), [6, 3], 16, on_cpu=True)
    assert [pools.k(layer).shape for layer in range(3)] == [(6, 2, 16, 64), (3, 1, 16, 32), (6, 2, 16, 64)]
    assert [pools.v(layer).dtype for layer in range(3)] == [dtype] * 3
    assert pools.page_bytes(0) == 2 * 2 * 2 * 16 * 64 * dtype.size
    assert pools.nbytes == sum(pools.k(layer).nbytes + pools.v(layer).nbytes for layer in range(3))
    for layer in range(3):
        assert float(mx.abs(pools.k(layer)).max()) == 0
        assert float(mx.abs(pools.v(layer)).max()) == 0


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_page_copy_touches_its_group_and_page_alone(dtype: mx.Dtype, on_cpu: bool) -> None:
    pools = KVPools(layout(dtype), [6, 3], 16, on_cpu=on_cpu)
    random = np.random.default_rng(0)
    for layer in range(3):
        for pool in (pools.k(layer), pools.v(layer)):
            pool[:] = mx.array(random.standard_normal(pool.shape).astype(np.float32)).astype(dtype)
            mx.eval(pool)
    before = {
        (layer, which): np.array(getattr(pools, which)(layer).astype(mx.float32))
        for layer in range(3)
        for which in "kv"
    }
    pools.copy_page(0, 4, 1)
    for (layer, which), old in before.items():
        expected = old.copy()
        if layer != 1:
            expected[1] = old[4]
        assert np.array_equal(np.array(getattr(pools, which)(layer).astype(mx.float32)), expected)


def test_released_memory_reads_as_zeros_and_can_be_written() -> None:
    array = mx.zeros((64, 4, 16, 64))
    mx.eval(array)
    prepare_zeroed(array)
    view = np.array(array, copy=False)
    assert not view.any()
    view[63, 3] = 7.0
    assert float(array.sum()) == 7.0 * 16 * 64


def test_arrays_smaller_than_a_memory_page_are_left_alone() -> None:
    array = mx.zeros((3,))
    mx.eval(array)
    assert not prepare_zeroed(array)

"""Launches of the CUDA page kernels, run on the CPU: every byte that should move does, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from page_kernels_double import CompiledKernels, NumpyKernels, host_compiler

from mlxcel_paged import _core
from mlxcel_paged.attention.cuda.page_kernels import CudaPageKernels
from mlxcel_paged.attention.page_write import places_of_plan, places_of_tokens
from mlxcel_paged.kernels_cuda.page_kernel import PageKernel
from mlxcel_paged.kvcache.layout import KVGroup, KVLayout
from mlxcel_paged.kvcache.pools import KVPools

PAGE_SIZES = (5, 8, 32, 128)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
NUM_HEADS = 3

Double = NumpyKernels | CompiledKernels
Make = Callable[..., tuple[KVPools, Double]]


@pytest.fixture(params=["numpy", "compiled"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes pools full of distinct bits, and what runs the launches on them."""
    if request.param == "compiled" and host_compiler() is None:
        pytest.skip("needs a C++ compiler on the host")

    def make_pools(dtype: mx.Dtype, page_size: int, head_dim: int, num_pages: int = 9) -> tuple[KVPools, Double]:
        double: Double = NumpyKernels() if request.param == "numpy" else CompiledKernels(tmp_path_factory.getbasetemp())
        group = KVGroup(0, (0, 1), 2 * NUM_HEADS, NUM_HEADS, head_dim, None, False, 0.0)
        pools = KVPools(
            KVLayout((group,), (0, 0), dtype),
            [num_pages],
            page_size,
            on_cpu=False,
            page_kernels=CudaPageKernels("sm_90", double),
        )
        random = np.random.default_rng(page_size + head_dim)
        for layer in range(2):
            for pool in (pools.k(layer), pools.v(layer)):
                memory = np.array(pool.view(mx.uint8), copy=False)
                memory[:] = random.integers(0, 256, memory.shape)
        double.register(pools)
        return pools, double

    return make_pools


def bits(array: mx.array) -> np.ndarray[Any, Any]:
    """The elements as integers: a copy in which NaN equals itself."""
    return np.array(array.view(mx.uint16 if array.dtype.size == 2 else mx.uint32))


def snapshot(pools: KVPools) -> list[np.ndarray[Any, Any]]:
    return [bits(pool(layer)) for layer in range(pools.layout.num_layers) for pool in (pools.k, pools.v)]


def new_rows(count: int, head_dim: int, dtype: mx.Dtype, seed: int) -> mx.array:
    """`[count, NUM_HEADS, head_dim]` as a model makes it for a chunk: a view of `[1, NUM_HEADS, count, head_dim]`."""
    random = np.random.default_rng(seed).standard_normal((1, NUM_HEADS, count, head_dim))
    return mx.array(random.astype(np.float32)).astype(dtype)[0].swapaxes(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 40), (3, 5), (31, 2), (37, 3)])
def test_a_chunk_is_written_to_its_places_alone(
    make: Make, dtype: mx.Dtype, page_size: int, first: int, count: int
) -> None:
    pools, _ = make(dtype, page_size, 64)
    pages = np.array([7, 2, 0, 8, 1, 3, 6, 4], np.int32)
    k_new, v_new = new_rows(count, 64, dtype, 1), new_rows(count, 64, dtype, 2)
    expected = snapshot(pools)
    for token in range(count):
        page, slot = divmod(first + token, page_size)
        expected[2][pages[page], :, slot] = bits(k_new[token])
        expected[3][pages[page], :, slot] = bits(v_new[token])
    places = mx.array(places_of_tokens(pages, first, count, page_size))
    assert pools.page_kernels is not None
    mx.eval(pools.page_kernels.write(pools.view_k(1), pools.view_v(1), k_new, v_new, places))
    for found, wanted in zip(snapshot(pools), expected, strict=True):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 20, 6, 3])
def test_rows_of_any_width_move(make: Make, head_dim: int) -> None:
    pools, _ = make(mx.float16, 5, head_dim)
    assert pools.page_kernels is not None
    k_new, v_new = new_rows(7, head_dim, mx.float16, 3), new_rows(7, head_dim, mx.float16, 4)
    places = np.array([44, 0, -1, 12, 3, -1, 21], np.int32)
    expected = snapshot(pools)
    for token, place in enumerate(places):
        if place >= 0:
            expected[0][place // 5, :, place % 5] = bits(k_new[token])
            expected[1][place // 5, :, place % 5] = bits(v_new[token])
    pools.page_kernels.write(pools.view_k(0), pools.view_v(0), k_new, v_new, mx.array(places))
    for found, wanted in zip(snapshot(pools), expected, strict=True):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_page_copy_touches_one_page_of_every_layer(make: Make, dtype: mx.Dtype, page_size: int) -> None:
    pools, double = make(dtype, page_size, 80)
    expected = snapshot(pools)
    for pool in expected:
        pool[3] = pool[8]
        pool[0] = pool[3]
    pools.copy_page(0, 8, 3)
    pools.copy_page(0, 3, 0)
    for found, wanted in zip(snapshot(pools), expected, strict=True):
        assert np.array_equal(found, wanted)
    assert double.launches == ["page_copy"] * 4


@pytest.mark.parametrize("pages", [(-1, 0), (0, 9), (9, 0)])
def test_a_page_outside_the_pool_is_refused(make: Make, pages: tuple[int, int]) -> None:
    pools, double = make(mx.float16, 8, 64)
    with pytest.raises(ValueError, match="pages of 9"):
        pools.copy_page(0, *pages)
    assert double.launches == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(
    ("first", "num_prefix", "num_new"), [(0, 1, 1), (0, 33, 7), (4, 31, 16), (9, 23, 1), (0, 32, 5)]
)
def test_a_prefix_is_laid_out_before_the_new_tokens(
    make: Make, dtype: mx.Dtype, page_size: int, first: int, num_prefix: int, num_new: int
) -> None:
    pools, _ = make(dtype, page_size, 96)
    pages = np.array([5, 8, 1, 0, 3, 2, 7, 6], np.int32)
    k_new, v_new = new_rows(num_new, 96, dtype, 5), new_rows(num_new, 96, dtype, 6)
    before = snapshot(pools)
    assert pools.page_kernels is not None
    dense = pools.page_kernels.gather(
        pools.view_k(1), pools.view_v(1), k_new, v_new, mx.array(pages), first_token=first, num_prefix=num_prefix
    )
    held = [divmod(first + token, page_size) for token in range(num_prefix)]
    for found, pool, new in zip(dense, before[2:], (k_new, v_new), strict=True):
        assert found.shape == (1, NUM_HEADS, num_prefix + num_new, 96)
        assert found.dtype == dtype
        old = np.stack([pool[pages[page], :, slot] for page, slot in held], axis=1)
        wanted = np.concatenate([old, bits(new).swapaxes(0, 1)], axis=1)
        assert np.array_equal(bits(found)[0], wanted)
    for found, wanted in zip(snapshot(pools), before, strict=True):
        assert np.array_equal(found, wanted)


def test_a_row_goes_after_its_newest_token_and_an_empty_row_nowhere() -> None:
    plan = _core.DecodePlan(
        max_slots=4, max_pages_per_slot=8, num_pages=20, page_size=5, num_qo_heads=2, num_kv_heads=1, head_dim=64
    )
    plan.admit([11, 3], 6)
    plan.admit([], 0)
    plan.admit([4, 19, 2], 15)
    plan.admit([7], 2, first_page_offset=1)
    assert places_of_plan(plan, 5).tolist() == [15, -1, 14, 37]


@pytest.mark.parametrize(("row_bytes", "chunk_bytes"), [(128, 16), (160, 16), (40, 8), (12, 4), (6, 2)])
def test_chunks_are_as_wide_as_a_row_allows(row_bytes: int, chunk_bytes: int) -> None:
    assert PageKernel.for_row("page_write", row_bytes, "sm_80").chunk_bytes == chunk_bytes


def test_odd_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="row_bytes"):
        PageKernel.for_row("page_write", 7, "sm_80")

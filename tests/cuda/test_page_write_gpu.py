"""The page kernels through MLX on a real GPU: bits against NumPy, and their order. Skipped elsewhere."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

if not mx.cuda.is_available():
    pytest.skip("needs a CUDA GPU and MLX's CUDA backend", allow_module_level=True)

from mlxcel_paged.attention.cuda.library import cuda_kernels
from mlxcel_paged.attention.page_write import places_of_tokens
from mlxcel_paged.kvcache.page_kernels import PageKernels

NUM_PAGES = 9
NUM_HEADS = 3
PAGE_SIZES = (5, 8, 32, 128)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)

Bits = np.ndarray[Any, Any]


@pytest.fixture
def kernels() -> PageKernels:
    found = cuda_kernels()
    assert found is not None
    return found.pages()


class Pools:
    """K and V of one layer, full of random bits, with a copy in NumPy. The GPU's memory is read through a copy only."""

    def __init__(self, dtype: mx.Dtype, page_size: int, head_dim: int, num_pages: int = NUM_PAGES) -> None:
        random = np.random.default_rng(page_size + head_dim)
        self.carrier = np.uint16 if dtype.size == 2 else np.uint32
        shape = (num_pages, NUM_HEADS, page_size, head_dim)
        self.wanted = [random.integers(0, 1 << (8 * dtype.size), shape, self.carrier) for _ in "kv"]
        # A result of a kernel, as the pools of a model are.
        self.arrays = [mx.bitwise_or(mx.array(bits), mx.array(0, mx.uint16)).view(dtype) for bits in self.wanted]
        self.views = [array[:1] for array in self.arrays]
        mx.eval(self.arrays, self.views)
        self.dtype, self.page_size, self.head_dim = dtype, page_size, head_dim

    def new_rows(self, count: int, seed: int) -> tuple[mx.array, Bits]:
        """`[count, NUM_HEADS, head_dim]` as a model makes it for a chunk, and its bits."""
        random = np.random.default_rng(seed)
        bits = random.integers(0, 1 << (8 * self.dtype.size), (1, NUM_HEADS, count, self.head_dim), self.carrier)
        rows = mx.array(bits).view(self.dtype)[0].swapaxes(0, 1)
        return rows, bits[0].swapaxes(0, 1)

    def check(self) -> None:
        for array, wanted in zip(self.arrays, self.wanted, strict=True):
            assert np.array_equal(host_bits(array), wanted)


def host_bits(array: mx.array) -> Bits:
    carrier = mx.uint16 if array.dtype.size == 2 else mx.uint32
    return np.array(mx.bitwise_or(array.view(carrier), mx.array(0, carrier)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 40), (3, 5), (31, 2), (37, 3)])
def test_a_chunk_is_written_to_its_places_alone(
    kernels: PageKernels, dtype: mx.Dtype, page_size: int, first: int, count: int
) -> None:
    pools = Pools(dtype, page_size, 64)
    pages = np.array([7, 2, 0, 8, 1, 3, 6, 4], np.int32)
    (k_new, k_bits), (v_new, v_bits) = pools.new_rows(count, 1), pools.new_rows(count, 2)
    for token in range(count):
        page, slot = divmod(first + token, page_size)
        pools.wanted[0][pages[page], :, slot] = k_bits[token]
        pools.wanted[1][pages[page], :, slot] = v_bits[token]
    places = mx.array(places_of_tokens(pages, first, count, page_size))
    token = kernels.write(*pools.views, k_new, v_new, places)
    assert np.array(token).tolist() == [0]
    pools.check()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 20, 6, 3])
def test_rows_of_any_width_move_and_padded_rows_do_not(kernels: PageKernels, head_dim: int) -> None:
    pools = Pools(mx.float16, 5, head_dim)
    (k_new, k_bits), (v_new, v_bits) = pools.new_rows(7, 3), pools.new_rows(7, 4)
    places = np.array([44, 0, -1, 12, 3, -1, 21], np.int32)
    for token, place in enumerate(places):
        if place >= 0:
            pools.wanted[0][place // 5, :, place % 5] = k_bits[token]
            pools.wanted[1][place // 5, :, place % 5] = v_bits[token]
    mx.eval(kernels.write(*pools.views, k_new, v_new, mx.array(places)))
    pools.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_copies_follow_one_another(kernels: PageKernels, dtype: mx.Dtype, page_size: int) -> None:
    pools = Pools(dtype, page_size, 80)
    for src, dst in ((8, 3), (3, 0), (1, 3)):
        mx.async_eval(kernels.copy(*pools.views, src, dst))
        for wanted in pools.wanted:
            wanted[dst] = wanted[src]
    pools.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(
    ("first", "num_prefix", "num_new"), [(0, 1, 1), (0, 33, 7), (4, 31, 16), (9, 23, 1), (0, 32, 5)]
)
def test_a_prefix_is_laid_out_before_the_new_tokens(
    kernels: PageKernels, dtype: mx.Dtype, page_size: int, first: int, num_prefix: int, num_new: int
) -> None:
    pools = Pools(dtype, page_size, 96)
    pages = np.array([5, 8, 1, 0, 3, 2, 7, 6], np.int32)
    (k_new, k_bits), (v_new, v_bits) = pools.new_rows(num_new, 5), pools.new_rows(num_new, 6)
    dense = kernels.gather(*pools.views, k_new, v_new, mx.array(pages), first_token=first, num_prefix=num_prefix)
    held = [divmod(first + token, page_size) for token in range(num_prefix)]
    for found, pool, new in zip(dense, pools.wanted, (k_bits, v_bits), strict=True):
        old = np.stack([pool[pages[page], :, slot] for page, slot in held], axis=1)
        assert np.array_equal(host_bits(found)[0], np.concatenate([old, new.swapaxes(0, 1)], axis=1))
    pools.check()


def test_one_width_after_the_other_in_one_process(kernels: PageKernels) -> None:
    for dtype, head_dim in ((mx.float16, 64), (mx.float16, 6), (mx.float32, 64), (mx.float16, 3), (mx.float16, 64)):
        pools = Pools(dtype, 8, head_dim)
        (k_new, k_bits), (v_new, v_bits) = pools.new_rows(1, 7), pools.new_rows(1, 8)
        pools.wanted[0][2, :, 1], pools.wanted[1][2, :, 1] = k_bits[0], v_bits[0]
        mx.eval(kernels.write(*pools.views, k_new, v_new, mx.array([17], mx.int32)))
        pools.check()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_reader_of_the_token_comes_after_the_write(kernels: PageKernels, is_ahead: bool) -> None:
    """In one evaluation through the token, and from one evaluation to the next without waiting."""
    page_size, head_dim, num_tokens = 16, 128, 4096
    pools = [mx.zeros((num_tokens // page_size, 8, page_size, head_dim), mx.float16) for _ in "kv"]
    views = [pool[:1] for pool in pools]
    page_ids = mx.arange(num_tokens // page_size, dtype=mx.int32)
    places = mx.arange(num_tokens, dtype=mx.int32)
    mx.eval(pools, views, page_ids, places)
    sums = []
    for step in range(60):
        new = mx.full((num_tokens, 8, head_dim), step % 50, mx.float16)
        token = kernels.write(*views, new, new, places)
        if is_ahead:
            mx.async_eval(token)
            read = [mx.take(pool, page_ids, axis=0) for pool in pools]
        else:
            read = [mx.take(pool, page_ids + token, axis=0) for pool in pools]
        sums.append(mx.stack([mx.stack([array.min(), array.max()]) for array in read]))
        mx.async_eval(sums[-1])
    for step, found in enumerate(sums):
        assert np.array(found).tolist() == [[step % 50] * 2] * 2


@pytest.mark.parametrize("num_elements", [(1 << 31) + (1 << 24), (1 << 32) + (1 << 24)])
def test_pools_past_32_bits(kernels: PageKernels, num_elements: int) -> None:
    page_size, num_heads, head_dim = 16, 8, 128
    num_pages = num_elements // (page_size * num_heads * head_dim)
    pools = [mx.zeros((num_pages, num_heads, page_size, head_dim), mx.float16) for _ in "kv"]
    views = [pool[:1] for pool in pools]
    mx.eval(pools, views)
    new = mx.arange(num_heads * head_dim).reshape(1, num_heads, head_dim).astype(mx.float16)
    last = num_pages - 1
    mx.eval(kernels.write(*views, new, 2 * new, mx.array([last * page_size + 5], mx.int32)))
    mx.eval(kernels.copy(*views, last, last - 1))
    keys, values = kernels.gather(*views, new, new, mx.array([last - 1], mx.int32), first_token=5, num_prefix=1)
    assert bool((keys[0, :, 0] == new[0]).all())
    assert bool((values[0, :, 0] == 2 * new[0]).all())
    for pool, scale in zip(pools, (1, 2), strict=True):
        tail = pool[last - 1 :]
        assert bool((tail[:, :, 5] == scale * new).all())
        rest = mx.concatenate([tail[:, :, :5], tail[:, :, 6:]], axis=2)
        assert not bool(mx.any(rest))
        wrapped = (last * page_size * num_heads * head_dim) % (1 << 31) // (page_size * num_heads * head_dim)
        for page in {0, wrapped, wrapped - 1} - {last, last - 1}:
            assert not bool(mx.any(pool[page]))
    del pools, views
    mx.clear_cache()


def test_writes_take_no_memory_of_the_pool_size(kernels: PageKernels) -> None:
    pools = [mx.zeros((8192, 8, 16, 128), mx.float16) for _ in "kv"]
    views = [pool[:1] for pool in pools]
    mx.eval(pools, views)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for step in range(20):
        new = mx.full((4, 8, 128), step, mx.float16)
        places = mx.arange(4, dtype=mx.int32) * 16 + step % 16
        token = kernels.write(*views, new, new, places)
        mx.async_eval(mx.take(pools[0], mx.arange(4, dtype=mx.int32) + token, axis=0).sum())
    mx.synchronize()
    assert mx.get_peak_memory() - before < pools[0].nbytes // 8

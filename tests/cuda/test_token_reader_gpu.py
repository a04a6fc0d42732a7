"""A step's tokens through page-locked memory on a real GPU: the same as out of their array, which stays on the device.
Skipped without a GPU."""

from __future__ import annotations

import ctypes
import gc
import random

import mlx.core as mx
import numpy as np
import pytest

if not mx.cuda.is_available():
    pytest.skip("needs a CUDA GPU and MLX's CUDA backend", allow_module_level=True)

from test_prefill_gpu import on_gpu
from tiny import VOCAB

from mlxcel_paged.attention.cuda.library import CudaKernels
from mlxcel_paged.engine.token_reader import ArrayTokens, TokenReader, new_token_reader
from mlxcel_paged.kernels_cuda.device import current_device
from mlxcel_paged.models.paged_model import PagedModel
from mlxcel_paged.models.paged_rows import PagedRows

_IS_MANAGED = 8  # CU_POINTER_ATTRIBUTE_IS_MANAGED


@pytest.fixture(scope="module")
def kernels() -> CudaKernels:
    return CudaKernels(current_device(), with_jit=False)


def reader_of(kernels: CudaKernels, max_tokens: int) -> TokenReader:
    reader = new_token_reader(kernels, max_tokens)
    assert reader is not None
    return reader


def is_managed(kernels: CudaKernels, array: mx.array) -> bool:
    """Whether the memory of `array` is managed, without a look at it from the host."""
    (addresses,) = kernels.array_addresses()([array] * 13, ((13,),), (mx.int64,), (), (1, 1))
    found = ctypes.c_uint(7)
    address = ctypes.c_uint64(addresses.tolist()[0])
    status = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(found), _IS_MANAGED, address)
    assert status == 0
    return bool(found.value)


def test_what_tolist_does_to_an_array_and_the_reader_does_not(kernels: CudaKernels) -> None:
    reader = reader_of(kernels, 700)
    mx.clear_cache()  # of buffers that some earlier read has moved
    tokens = mx.arange(700, dtype=mx.int32) * 3
    assert reader.publish(tokens, 700).wait() == list(range(0, 2100, 3))
    assert not is_managed(kernels, tokens)
    assert tokens.tolist() == list(range(0, 2100, 3))
    assert is_managed(kernels, tokens)


@pytest.mark.parametrize("max_tokens", [1, 31, 32, 64, 512])
def test_every_step_gets_its_own_tokens_however_late_it_is_read(kernels: CudaKernels, max_tokens: int) -> None:
    draw = random.Random(max_tokens)
    reader = reader_of(kernels, max_tokens)
    waiting = []
    for step in range(500):
        num_tokens = draw.randint(1, max_tokens)
        tokens = mx.arange(num_tokens + draw.randint(0, 8)).astype(mx.int32) * 7 + step
        pending = reader.publish(tokens, num_tokens)
        assert not isinstance(pending, ArrayTokens)
        waiting.append((pending, step, num_tokens))
        del pending
        while len(waiting) > draw.randint(0, 9):
            taken, at, count = waiting.pop(draw.randrange(len(waiting)))
            if draw.random() < 0.8:
                assert taken.wait() == [7 * index + at for index in range(count)]


@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_decode_one_step_ahead_reads_what_tolist_reads(kernels: CudaKernels, num_rows: int) -> None:
    paged = PagedModel(
        on_gpu("llama", mx.float16), num_pages=40 * num_rows, page_size=8, max_slots=num_rows, max_context=320
    )
    reader = reader_of(kernels, num_rows)
    runs = []
    for through_reader in (True, False):
        rows = PagedRows(paged)
        for row in range(num_rows):
            rows.add(np.random.default_rng(row).integers(0, VOCAB, 9 + row).tolist())
        tokens = mx.zeros((paged.launch_rows(num_rows),), mx.int32)
        last, found = None, []
        for _ in range(200):
            tokens = mx.argmax(rows.decode(tokens), axis=-1).view(mx.int32)
            pending = reader.publish(tokens, num_rows) if through_reader else ArrayTokens(tokens, num_rows)
            mx.async_eval(tokens)
            if last is not None:
                found.append(last.wait())
            last = pending
        runs.append(found)
        rows.close()
    assert runs[0] == runs[1]
    assert len({tuple(step) for step in runs[0]}) > 1


def test_readers_come_and_go_while_their_launches_are_under_way(kernels: CudaKernels) -> None:
    other = reader_of(kernels, 64)
    for step in range(50):
        reader = reader_of(kernels, 64)
        work = mx.random.uniform(shape=(1024, 1024))
        for _ in range(4):
            work = mx.matmul(work, work) * 1e-3
        reader.publish((mx.sum(work) * 0).astype(mx.int32) + mx.arange(64, dtype=mx.int32), 64)
        del reader
        gc.collect()
        assert other.publish(mx.full((64,), step, mx.int32), 64).wait() == [step] * 64

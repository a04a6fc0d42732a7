"""Runs launches of the CUDA page kernels on the CPU, from nothing but their arguments.

`NumpyKernels` says in NumPy what the arguments mean. `CompiledKernels` compiles the very sources in `kernels/cuda` for
the host, which needs a C++ compiler: the kernels have no barriers, so threads may run one after the other.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_paged.attention.cuda.page_kernels import NUM_THREADS, PageLaunch
from mlxcel_paged.kernels_cuda import source_dir
from mlxcel_paged.kernels_cuda.page_kernel import PAGE_OPERATIONS
from mlxcel_paged.kvcache.pools import KVPools

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_HOST = """
#include <utility>
struct Dimensions { unsigned x, y, z; };
static Dimensions blockIdx, threadIdx, blockDim, gridDim;
#define __global__
#define __device__
#define __forceinline__ inline
#define alignas(bytes)  // MLX aligns CPU memory to 8 bytes only
#include "OPERATION.cu"

template <class... Arguments, std::size_t... kIndex>
void call(void (*kernel)(Arguments...), void** arguments, std::index_sequence<kIndex...>) {
  kernel(*static_cast<Arguments*>(arguments[kIndex])...);
}

template <class... Arguments>
void run(void (*kernel)(Arguments...), void** arguments) {
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
      for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
        call(kernel, arguments, std::index_sequence_for<Arguments...>{});
}

extern "C" void launch(unsigned grid_x, unsigned grid_y, unsigned num_threads, void** arguments) {
  gridDim = {grid_x, grid_y, 1};
  blockDim = {num_threads, 1, 1};
  run(mlxcel_OPERATION, arguments);
}
"""


def raw(array: mx.array) -> Bytes:
    """The bytes of an evaluated, row-contiguous array: its own memory."""
    return np.array(array.view(mx.uint8), copy=False).reshape(-1)


class _Double:
    """A launch that has the pools' whole memory, of which a launch only gets the first page. Eager.

    Attributes:
        launches: Operations in the order of their launches.
        order_token: What writers return; 0 as the kernels do, unless a test looks for who reads it.
    """

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.order_token = 0
        self._pools: dict[int, Bytes] = {}

    def register(self, pools: KVPools) -> None:
        for layer in range(pools.layout.num_layers):
            for pool in (pools.k(layer), pools.v(layer)):
                memory = raw(pool)
                self._pools[memory.ctypes.data] = memory

    def __call__(self, launch: PageLaunch) -> list[mx.array]:
        self.launches.append(launch.kernel.operation)
        inputs = [self._memory(array) for array in launch.inputs]
        outputs = [np.full(int(np.prod(shape)) * dtype.size, 0xAB, np.uint8) for shape, dtype in launch.outputs]
        self._run(launch, inputs, outputs)
        if launch.kernel.operation != "page_gather":
            assert outputs[0].view(np.int32).tolist() == [0]
            outputs[0].view(np.int32)[0] = self.order_token
        return [
            mx.array(memory).view(dtype).reshape(shape)
            for memory, (shape, dtype) in zip(outputs, launch.outputs, strict=True)
        ]

    def _memory(self, array: mx.array) -> Bytes:
        mx.eval(array)
        found = self._pools.get(np.array(array.view(mx.uint8), copy=False).ctypes.data)
        if found is not None:
            return found
        copy = mx.contiguous(array)
        mx.eval(copy)
        return raw(copy).copy()

    def _run(self, launch: PageLaunch, inputs: list[Bytes], outputs: list[Bytes]) -> None:
        raise NotImplementedError


class NumpyKernels(_Double):
    """The meaning of the arguments. Offsets are checked: NumPy would wrap negative ones."""

    def _run(self, launch: PageLaunch, inputs: list[Bytes], outputs: list[Bytes]) -> None:
        getattr(self, "_" + launch.kernel.operation)(launch, inputs, outputs)

    def _page_write(self, launch: PageLaunch, inputs: list[Bytes], outputs: list[Bytes]) -> None:
        num_tokens, num_heads, row, new_token, new_head, page_size, page, head, token = launch.scalars
        k_new, v_new, k_pages, v_pages = (_chunks(memory, launch) for memory in inputs[:4])
        places = inputs[4].view(np.int32)
        assert len(places) == num_tokens
        t, h, c = np.meshgrid(np.flatnonzero(places >= 0), range(num_heads), range(row), indexing="ij")
        source = t * new_token + h * new_head + c
        place = places[t].astype(np.int64)
        target = place // page_size * page + h * head + place % page_size * token + c
        for new, pages in ((k_new, k_pages), (v_new, v_pages)):
            _check(source, new)
            _check(target, pages)
            pages[target] = new[source]
        outputs[0].view(np.int32)[0] = 0

    def _page_copy(self, launch: PageLaunch, inputs: list[Bytes], outputs: list[Bytes]) -> None:
        src, dst, page = launch.scalars
        for memory in inputs:
            pages = _chunks(memory, launch)
            _check(np.array([(max(src, dst) + 1) * page - 1]), pages)
            pages[dst * page : (dst + 1) * page] = pages[src * page : (src + 1) * page]
        outputs[0].view(np.int32)[0] = 0

    def _page_gather(self, launch: PageLaunch, inputs: list[Bytes], outputs: list[Bytes]) -> None:
        first, num_prefix, num_new, row, new_token, new_head, page_size, page, head, token = launch.scalars
        page_ids = inputs[4].view(np.int32).astype(np.int64)
        for memories in ((inputs[0], inputs[2], outputs[0]), (inputs[1], inputs[3], outputs[1])):
            new, pages, dense = (_chunks(memory, launch) for memory in memories)
            h, t, c = np.meshgrid(range(launch.num_heads), range(num_prefix + num_new), range(row), indexing="ij")
            old = t < num_prefix
            held = np.where(old, first + t, 0)
            source = page_ids[held // page_size] * page + h * head + held % page_size * token + c
            _check(source[old], pages)
            fresh = np.where(old, 0, (t - num_prefix) * new_token + h * new_head + c)
            _check(fresh, new)
            target = (h * (num_prefix + num_new) + t) * row + c
            assert len(dense) == target.size
            dense[target] = np.where(old[..., None], pages[np.where(old, source, 0)], new[fresh])


class CompiledKernels(_Double):
    """The sources themselves, compiled for the host."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def _run(self, launch: PageLaunch, inputs: list[Bytes], outputs: list[Bytes]) -> None:
        pointers = [ctypes.c_void_p(memory.ctypes.data) for memory in (*inputs, *outputs)]
        scalars = [ctypes.c_int32(value) for value in launch.scalars]
        values = [*pointers, *scalars]
        array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        library = _host_library(launch.kernel.operation, launch.kernel.chunk_bytes, self._folder)
        library.launch(*map(ctypes.c_uint, (*launch.grid, NUM_THREADS)), array)


def host_compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@cache
def _host_library(operation: str, chunk_bytes: int, folder: Path) -> ctypes.CDLL:
    assert operation in PAGE_OPERATIONS
    source = folder / f"{operation}_{chunk_bytes}.cpp"
    source.write_text(_HOST.replace("OPERATION", operation))
    library = source.with_suffix(".so")
    command = [
        str(host_compiler()),
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{source_dir()}",
        f"-DMLXCEL_CHUNK_BYTES={chunk_bytes}",
        str(source),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(library))


def _chunks(memory: Bytes, launch: PageLaunch) -> Bytes:
    return memory.reshape(-1, launch.kernel.chunk_bytes)


def _check(offsets: np.ndarray[Any, Any], memory: Bytes) -> None:
    if offsets.size:
        assert 0 <= int(offsets.min()) <= int(offsets.max()) < len(memory)

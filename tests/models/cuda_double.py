"""Doubles of the CUDA kernels on MLX's CPU arrays.

They take the very arguments of a launch and read and write memory as the kernels do, in place included. Slow; for
tests of everything around the kernels on a host without a GPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from page_kernels_double import NumpyKernels

from mlxcel_paged.attention.cuda.kernel import Kernel, Scalar, Shape
from mlxcel_paged.attention.cuda.library import CudaKernels
from mlxcel_paged.attention.cuda.page_kernels import CudaPageKernels
from mlxcel_paged.kernels_cuda.device import CudaDevice
from mlxcel_paged.kernels_cuda.launch import OPTION_APPEND, OPTION_LSE, OPTION_SINKS
from mlxcel_paged.kernels_cuda.variant import RopeShape
from mlxcel_paged.kvcache.page_kernels import PageKernels

Array = np.ndarray[Any, Any]

MAX_STEP_WORDS = 24


def memory(array: mx.array) -> Array:
    """The memory of `array`, writable."""
    mx.eval(array)
    return np.array(array, copy=False)


class PlanStepDouble:
    """`plan_step.cu`."""

    def __init__(self) -> None:
        self.num_words: list[int] = []  # of every launch
        self.after: mx.array | None = None  # what the last launch came after

    def __call__(
        self,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Shape],
        output_dtypes: Sequence[mx.Dtype],
        scalars: Sequence[Scalar],
        num_blocks: tuple[int, int],
    ) -> list[mx.array]:
        num_slots, row_slots_begin, num_rows, num_words, *words = (int(scalar) for scalar in scalars)
        assert len(words) == 2 * MAX_STEP_WORDS
        assert num_words <= MAX_STEP_WORDS
        self.num_words.append(num_words)
        self.after = inputs[2]
        mx.eval(inputs[2])
        state, table = memory(inputs[0]).copy(), memory(inputs[1])
        for address, value in zip(words[: 2 * num_words : 2], words[1 : 2 * num_words : 2], strict=True):
            if address < 2 * num_slots:
                state[address] = value
            else:
                table[address - 2 * num_slots] = value
        slots = table[row_slots_begin : row_slots_begin + num_rows]
        positions = np.zeros(output_shapes[1], np.int32)
        positions[:num_rows] = state[num_slots + slots]
        live = slots[slots != num_slots - 1]
        state[live] += 1
        state[num_slots + live] += 1
        return [mx.array(state), mx.array(positions)]


class DecodeDouble:
    """`paged_decode.cu`, in float64. RoPE is rounded where the kernel rounds it."""

    def __init__(self, rope: RopeShape | None = None) -> None:
        self._rope = rope
        self.num_launches = 0

    def __call__(
        self,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Shape],
        output_dtypes: Sequence[mx.Dtype],
        scalars: Sequence[Scalar],
        num_blocks: tuple[int, int],
    ) -> list[mx.array]:
        (num_items, num_workers, num_kv_heads, group_size, page_log2, table_stride, *_strides, window, options) = (
            int(scalar) for scalar in scalars[:13]
        )
        page_stride, head_stride, token_stride = (int(scalar) for scalar in scalars[8:11])
        assert all(float(np.float32(scalar)) == scalar for scalar in scalars[13:]), "MLX would refuse it"
        scale, cap_log2, cap_inverse2 = scalars[13:]
        assert num_blocks == (num_kv_heads, num_workers)
        q, k_new, v_new = (_values(array) for array in inputs[:3])
        self.num_launches += 1
        num_rows, dim = q.shape[0], q.shape[-1]
        q = q.reshape(num_rows, num_kv_heads, group_size, dim)
        if self._rope is not None:
            table = memory(inputs[10])
            assert table.shape == (num_rows, 1, 1, self._rope.dims)
            assert table.dtype == np.float32
            q = _rotated(q, table, self._rope, inputs[0].dtype)
            k_new = _rotated(k_new.reshape(num_rows, num_kv_heads, 1, dim), table, self._rope, inputs[0].dtype)
        table, lengths = memory(inputs[5]), memory(inputs[6])
        items = memory(inputs[8]).reshape(-1, 8)[:num_items]
        strides = (page_stride, head_stride, token_stride)
        pools = [_pool(view, strides, num_kv_heads, 1 << page_log2) for view in inputs[3:5]]
        partials: dict[int, list[tuple[Array, Array, Array]]] = {}
        for worker in range(num_workers):
            for slot, begin, end, flags, row, split, num_splits, _ in items[worker::num_workers].tolist():
                if not flags & 1:
                    break
                length = int(lengths[slot])
                last = length if flags & 2 else min(end, length)
                first = max(begin, length - window) if window else begin
                tokens = np.arange(first, max(first, last))
                pages = table[slot * table_stride + (tokens >> page_log2)]
                places = tokens & ((1 << page_log2) - 1)
                if options & OPTION_APPEND and flags & 2 and len(tokens):
                    for pool, new in zip(pools, (k_new, v_new), strict=True):
                        pool[pages[-1], :, places[-1]] = _bits(new[row].reshape(num_kv_heads, dim), inputs[3].dtype)
                keys, values = (_floats(pool[pages, :, places], inputs[3].dtype) for pool in pools)
                scores = np.einsum("hgd,thd->hgt", q[row], keys) * scale
                if cap_log2:
                    scores = cap_log2 * np.tanh(scores * cap_inverse2 / 2 / math.log2(math.e))
                top = scores.max(axis=-1, initial=-math.inf, keepdims=True)
                weights = np.exp2(scores - np.where(np.isfinite(top), top, 0.0))
                partials.setdefault(row, []).append(
                    (top, weights.sum(axis=-1, keepdims=True), np.einsum("hgt,thd->hgd", weights, values))
                )
                assert 0 <= split < num_splits
        sinks = memory(inputs[9]).astype(np.float64) if options & OPTION_SINKS else None
        out = np.full((num_rows, num_kv_heads, group_size, dim), np.nan)
        lse = np.full((num_rows, num_kv_heads * group_size), np.nan)
        for row, parts in partials.items():
            tops = [part[0] for part in parts]
            if sinks is not None:
                tops.append(sinks.reshape(num_kv_heads, group_size, 1) * math.log2(math.e))
            top = np.maximum.reduce(tops)
            base = np.where(np.isfinite(top), top, 0.0)
            total = sum(part[1] * np.exp2(part[0] - base) for part in parts)
            weighted = sum(part[2] * np.exp2(part[0] - base) for part in parts)
            if sinks is not None:
                total = total + np.exp2(tops[-1] - base)
            out[row] = weighted / np.where(total == 0, 1.0, total)
            with np.errstate(divide="ignore"):
                lse[row] = (base + np.log2(total)).reshape(-1)
        result = mx.array(out.astype(np.float32)).reshape(output_shapes[-1]).astype(output_dtypes[-1])
        return [mx.array(lse.astype(np.float32)), result] if options & OPTION_LSE else [result]


class ArrayAddressesDouble:
    """`array_addresses.cu`. MLX keeps 8 bytes before an array on the CPU, and none on a GPU."""

    def __call__(
        self,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Shape],
        output_dtypes: Sequence[mx.Dtype],
        scalars: Sequence[Scalar],
        num_blocks: tuple[int, int],
    ) -> list[mx.array]:
        assert output_shapes == ((len(inputs),),)
        assert not scalars
        words = (memory(array.view(mx.uint16)) for array in inputs)
        return [mx.array(np.array([array.__array_interface__["data"][0] - 8 for array in words], np.int64))]


class PublishTokensDouble:
    """`publish_tokens.cu`, at once: the earliest that a kernel can write.

    Args:
        device_base: Where the device finds host address 0.
    """

    def __init__(self, device_base: int = 0) -> None:
        self.device_base = device_base

    def __call__(
        self,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Shape],
        output_dtypes: Sequence[mx.Dtype],
        scalars: Sequence[Scalar],
        num_blocks: tuple[int, int],
    ) -> list[mx.array]:
        low, high, num_tokens, step = (int(scalar) for scalar in scalars)
        assert all(-(2**31) <= scalar < 2**31 for scalar in scalars), "MLX would refuse it"
        assert (num_blocks, output_shapes, output_dtypes) == ((1, 1), ((1,),), (mx.int32,))
        assert inputs[0].dtype == mx.int32
        address = (high << 32 | low & 0xFFFFFFFF) - self.device_base
        slot = np.ctypeslib.as_array((ctypes.c_int32 * (1 + num_tokens)).from_address(address))
        slot[1:] = memory(inputs[0])[:num_tokens]
        slot[0] = step
        return [mx.array([step], mx.int32)]


class KernelsDouble(CudaKernels):
    """`CudaKernels` of a GPU with few multiprocessors."""

    def __init__(self, num_multiprocessors: int = 12) -> None:
        super().__init__(CudaDevice((9, 0), num_multiprocessors))
        self.step_double = PlanStepDouble()
        self.page_double = NumpyKernels()
        self.decode_doubles: dict[RopeShape | None, DecodeDouble] = {}

    def decode(self, *, head_dim: int, group_size: int, dtype: mx.Dtype, rope: RopeShape | None = None) -> Kernel:
        found = self.decode_doubles.get(rope)
        if found is None:
            found = self.decode_doubles[rope] = DecodeDouble(rope)
        return found

    def array_addresses(self) -> Kernel:
        return ArrayAddressesDouble()

    def pages(self) -> PageKernels:
        return CudaPageKernels("sm_90", self.page_double)

    def publish_tokens(self) -> Kernel:
        return PublishTokensDouble()

    def plan_step(self) -> Kernel:
        return self.step_double


def _pool(view: mx.array, strides: tuple[int, int, int], num_heads: int, page_size: int) -> Array:
    """The whole pool `[pages, heads, page_size, dim]` of which `view` is the beginning, as words of an element."""
    mx.eval(view)
    words = np.array(view.view(_word(view.dtype)), copy=False)
    shape = (2**31 // strides[0], num_heads, page_size, view.shape[-1])
    sizes = tuple(view.itemsize * stride for stride in (*strides, 1))
    return np.lib.stride_tricks.as_strided(words, shape, sizes, writeable=True)


def _rotated(x: Array, table: Array, rope: RopeShape, dtype: mx.Dtype) -> Array:
    turned, rest = x[..., : rope.dims], x[..., rope.dims :]
    pairs = table.astype(np.float64).reshape(x.shape[0], 1, 1, rope.dims // 2, 2)
    cosine, sine = pairs[..., 0], pairs[..., 1]
    if rope.traditional:
        x1, x2 = turned[..., ::2], turned[..., 1::2]
    else:
        x1, x2 = turned[..., : rope.dims // 2], turned[..., rope.dims // 2 :]
    both = (x1 * cosine - x2 * sine, x1 * sine + x2 * cosine)
    result = np.stack(both, axis=-1).reshape(turned.shape) if rope.traditional else np.concatenate(both, axis=-1)
    return np.concatenate([_values(mx.array(result.astype(np.float32)).astype(dtype)), rest], axis=-1)


def _values(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _floats(words: Array, dtype: mx.Dtype) -> Array:
    return _values(mx.array(np.ascontiguousarray(words)).view(dtype))


def _bits(values: Array, dtype: mx.Dtype) -> Array:
    return np.array(mx.array(values.astype(np.float32)).astype(dtype).view(_word(dtype)))


def _word(dtype: mx.Dtype) -> mx.Dtype:
    """The unsigned integer of an element's size. The kernel knows 16 bits alone; tests may ask for more."""
    return mx.uint32 if dtype == mx.float32 else mx.uint16

"""Launches the kernel through the CUDA driver, without a framework: for tests and kernel benchmarks.

The caller owns the memory and passes device addresses. MLX compiles the same source itself, or launches the same cubin
as a precompiled kernel; the order of the arguments here is the kernel's.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from .nvrtc import ENTRY_POINT, Compiled
from .variant import KernelVariant

_LOG2E = math.log2(math.e)
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

# Bits of every word of partial_out and partial_state before the first launch, as int32; launches leave them so.
WORKSPACE_FILL = -1

OPTION_APPEND = 1
OPTION_FIRST_PAGE_OFFSET = 2
OPTION_SINKS = 4
OPTION_LSE = 8


@dataclass(frozen=True, slots=True)
class DecodeArguments:
    """One launch. Addresses are device pointers, 0 where an option leaves the array unread; see `work_item.cuh` for
    shapes and dtypes. Strides count elements."""

    q: int
    k_pages: int
    v_pages: int
    page_table: int
    lengths: int
    work_items: int
    partial_out: int
    partial_state: int
    arrivals: int
    out: int
    num_items: int
    num_workers: int
    num_kv_heads: int
    group_size: int
    page_size: int
    page_table_stride: int
    q_row_stride: int
    page_stride: int
    head_stride: int
    token_stride: int
    sm_scale: float
    k_new: int = 0
    v_new: int = 0
    new_row_stride: int = 0
    first_page_offsets: int = 0
    sinks: int = 0
    rotations: int = 0
    lse: int = 0
    window: int = 0
    logits_soft_cap: float = 0.0

    @property
    def options(self) -> int:
        return (
            (OPTION_APPEND if self.k_new else 0)
            | (OPTION_FIRST_PAGE_OFFSET if self.first_page_offsets else 0)
            | (OPTION_SINKS if self.sinks else 0)
            | (OPTION_LSE if self.lse else 0)
        )

    def pointers(self) -> tuple[int, ...]:
        """Device addresses in the kernel's order: inputs, workspace, lse, out."""
        return (
            self.q,
            self.k_new,
            self.v_new,
            self.k_pages,
            self.v_pages,
            self.page_table,
            self.lengths,
            self.first_page_offsets,
            self.work_items,
            self.sinks,
            self.rotations,
            self.partial_out,
            self.partial_state,
            self.arrivals,
            self.lse,
            self.out,
        )

    def scalars(self) -> tuple[int | float, ...]:
        """By-value arguments in the kernel's order: int is int32, float is float32."""
        cap = self.logits_soft_cap
        return (
            self.num_items,
            self.num_workers,
            self.num_kv_heads,
            self.group_size,
            self.page_size.bit_length() - 1,
            self.page_table_stride,
            self.q_row_stride,
            self.new_row_stride,
            self.page_stride,
            self.head_stride,
            self.token_stride,
            self.window,
            self.options,
            float(self.sm_scale if cap else self.sm_scale * _LOG2E),
            float(cap * _LOG2E),
            float(2.0 * _LOG2E / cap) if cap else 0.0,
        )


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: the value is a union of 64 bytes at offset 8."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CudaFunction:
    """A function of a cubin, loaded into the current CUDA context."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int = 0) -> None:
        driver = _driver()
        module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        self._shared_bytes = shared_bytes
        _check(driver.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), "cuModuleGetFunction")
        _check(driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes), "cuFuncSetAttribute")

    def launch(
        self,
        grid: tuple[int, int],
        num_threads: int,
        pointers: Sequence[int],
        scalars: Sequence[int | float],
        stream: int,
        *,
        overlaps_previous: bool = False,
    ) -> None:
        """Enqueues one launch on `stream` (a CUstream address). Scalars: int is int32, float is float32.

        Args:
            overlaps_previous: the kernel may begin before the launch before it has ended (programmatic dependent
                launch); it must wait for it by itself.

        Raises:
            RuntimeError: the driver refuses the launch.
        """
        values: list[ctypes.c_uint64 | ctypes.c_int32 | ctypes.c_float] = [ctypes.c_uint64(item) for item in pointers]
        for scalar in scalars:
            values.append(ctypes.c_float(scalar) if isinstance(scalar, float) else ctypes.c_int32(scalar))
        array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attribute = _LaunchAttribute(id=_PROGRAMMATIC_SERIALIZATION, value=(1,))
        config = _LaunchConfig(
            grid=(*grid, 1),
            block=(num_threads, 1, 1),
            shared_bytes=self._shared_bytes,
            stream=stream,
            attributes=ctypes.pointer(attribute),
            num_attributes=int(overlaps_previous),
        )
        status = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, array, None)
        _check(status, "cuLaunchKernelEx")


class DecodeKernel:
    """A variant of the decode kernel, loaded into the current CUDA context."""

    def __init__(self, variant: KernelVariant, compiled: Compiled) -> None:
        self.variant = variant
        self._function = CudaFunction(compiled.cubin, ENTRY_POINT, variant.shared_bytes)

    def launch(self, arguments: DecodeArguments, stream: int = 0, *, overlaps_previous: bool = False) -> None:
        """Enqueues one launch on `stream` (a CUstream address).

        Args:
            overlaps_previous: reading the plan and K and V of older tokens may begin before the launch before this one
                on the stream has ended (sm_90 and later). It then must write neither the plan nor tokens of these
                pools; queries, new tokens and the workspace may be its results.

        Raises:
            RuntimeError: the driver refuses the launch.
        """
        self._function.launch(
            (arguments.num_kv_heads, arguments.num_workers),
            self.variant.num_threads,
            arguments.pointers(),
            arguments.scalars(),
            stream,
            overlaps_previous=overlaps_previous,
        )


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, call: str) -> None:
    if status != 0:
        raise RuntimeError(f"{call} failed with CUDA driver error {status}")

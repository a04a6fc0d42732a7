"""Page-locked host memory that kernels write through a pointer, from the CUDA driver."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PORTABLE, _MAPPED = 1, 2


class PinnedMemoryError(RuntimeError):
    """The driver refuses page-locked memory."""


class PinnedMemory:
    """Host memory that the device can write while the host reads.

    It belongs to the primary context of a GPU, which is MLX's; any thread may make and free it.

    Args:
        num_bytes: its size.
        ordinal: the GPU.
        driver: the CUDA driver, `libcuda.so.1`, unless a test brings another.

    Attributes:
        words: the memory, [num_bytes / 4] int32; not to be used once it is freed.
        device_address: where a kernel finds it.

    Raises:
        PinnedMemoryError: there is no GPU or no such memory.
    """

    def __init__(self, num_bytes: int, ordinal: int = 0, driver: Any = None) -> None:
        self._driver = driver if driver is not None else _load_driver()
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._pointer: ctypes.c_void_p | None = None
        address, device_address = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(ordinal))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        try:
            with _Current(self):
                flags = ctypes.c_uint(_PORTABLE | _MAPPED)
                self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(num_bytes), flags)
                self._pointer = address
                self._call(
                    "cuMemHostGetDevicePointer_v2", ctypes.byref(device_address), self._pointer, ctypes.c_uint(0)
                )
        except PinnedMemoryError:
            self.free()
            raise
        assert address.value is not None
        memory = (ctypes.c_int32 * (num_bytes // 4)).from_address(address.value)
        self.words: NDArray[np.int32] = np.ctypeslib.as_array(memory)
        self.words[:] = 0
        self.device_address = device_address.value

    def free(self) -> None:
        """Gives the memory back; no launch that writes it may be under way.

        Raises:
            PinnedMemoryError: the driver refuses, for instance after a kernel has failed.
        """
        pointer, self._pointer = self._pointer, None
        context, self._context = self._context, ctypes.c_void_p()
        if pointer is not None:
            with _Current(self, context):
                self._call("cuMemFreeHost", pointer)
        if context.value is not None:
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise PinnedMemoryError(f"{name} failed with CUDA driver error {status}")


class _Current:
    """Makes the memory's context current on this thread for a while."""

    def __init__(self, memory: PinnedMemory, context: ctypes.c_void_p | None = None) -> None:
        self._memory = memory
        self._context = context or memory._context

    def __enter__(self) -> None:
        self._memory._call("cuCtxPushCurrent_v2", self._context)

    def __exit__(self, *_: object) -> None:
        self._memory._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def _load_driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PinnedMemoryError(f"the CUDA driver cannot be loaded: {error}") from error

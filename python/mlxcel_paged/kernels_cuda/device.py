"""What the kernels need to know about the GPU of this process, asked from the CUDA driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_MULTIPROCESSOR_COUNT = 16
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76


class NoCudaDeviceError(RuntimeError):
    """There is no NVIDIA GPU, or its driver cannot be used."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A GPU.

    Attributes:
        capability: compute capability, (major, minor).
        num_multiprocessors: streaming multiprocessors.
    """

    capability: tuple[int, int]
    num_multiprocessors: int

    @property
    def architecture(self) -> str:
        """The compiler's name of its instruction set, as in `KernelVariant.architecture`."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def current_device(ordinal: int = 0) -> CudaDevice:
    """Asks the driver about GPU `ordinal`; makes no context.

    Raises:
        NoCudaDeviceError: there is none.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoCudaDeviceError(f"the CUDA driver cannot be loaded: {error}") from error
    device = ctypes.c_int()
    _check(driver.cuInit(0), "cuInit")
    _check(driver.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _check(driver.cuDeviceGetAttribute(ctypes.byref(value), number, device), f"cuDeviceGetAttribute({number})")
        return value.value

    return CudaDevice((attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)), attribute(_MULTIPROCESSOR_COUNT))


def _check(status: int, call: str) -> None:
    if status != 0:
        raise NoCudaDeviceError(f"{call} failed with CUDA driver error {status}")

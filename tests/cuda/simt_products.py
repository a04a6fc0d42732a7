"""Runs the kernels for products on the host, lane by lane, in the place of `mx.fast.cuda_kernel`."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_paged.kernels_cuda.nvrtc import source_dir
from mlxcel_paged.models.product_launch import NUM_THREADS

SIMT = Path(__file__).parent / "simt"
_POISON = 0x7E5A  # NaN in both element types
_PADDING = 256  # bytes


class _DensePart(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in ("w", "b", "y")), ("num_features", ctypes.c_int))


class _AffinePart(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in ("w", "s", "o", "b", "y")), ("num_features", ctypes.c_int))


def build(folder: Path, architecture: int) -> ctypes.CDLL:
    """Compiles the kernels as for `architecture`, for example 900.

    Raises:
        FileNotFoundError: there is no C++ compiler.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler: install g++")
    # A quoted include looks beside its file first, so the kernels are copied to where the other primitives are.
    for path in [*source_dir().glob("*.cuh"), *SIMT.iterdir()]:
        shutil.copyfile(path, folder / path.name)
    library = folder / f"products_{architecture}.so"
    # No contraction: what is fused in the kernels is fused by name.
    options = ["-O2", "-std=c++20", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-Wno-unknown-pragmas"]
    source = str(folder / "products.cpp")
    subprocess.run(
        [compiler, *options, f"-DMLXCEL_ARCHITECTURE={architecture}", source, "-o", str(library)], check=True
    )
    return ctypes.CDLL(str(library))


class SimtKernel:
    """What `mx.fast.cuda_kernel` returns for the kernels of products: launches run on the host.

    Inputs lie between NaN, outputs too, and what is written outside of an output fails.
    """

    x_shift = 0
    """Elements between a 16-byte boundary and the first row."""

    def __init__(self, library: ctypes.CDLL, name: str, input_names: list[str], output_names: list[str]) -> None:
        self._library = library
        self._inputs = input_names
        self._outputs = output_names
        self._is_bf16 = int("Bf16" in name)
        affine = re.fullmatch(r"mlxcel_projection_affine_B?[fF]16_(\d+)_(\d+)_[01]+", name)
        self._affine = None if affine is None else (int(affine[1]), int(affine[2]))

    def __call__(
        self,
        inputs: list[mx.array],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]:
        assert threadgroup == (NUM_THREADS, 1, 1)
        arrays = {
            name: _Placed(_words(array), self.x_shift if name == "x" else 0)
            for name, array in zip(self._inputs, inputs, strict=True)
        }
        num_rows, _, num_inner = inputs[0].shape
        outputs = [_Placed(np.full((num_rows, shape[2]), _POISON, np.uint16)) for shape in output_shapes]
        kind = _DensePart if self._affine is None else _AffinePart
        parts = (kind * len(outputs))()
        for index, output in enumerate(outputs):
            for name in ("w", "s", "o", "b"):
                if f"{name}{index}" in arrays:
                    setattr(parts[index], name, arrays[f"{name}{index}"].address)
            parts[index].y = output.address
            parts[index].num_features = output.values.shape[1]
        launch = (
            ctypes.c_void_p(arrays["x"].address),
            parts,
            len(outputs),
            num_rows,
            num_inner,
            grid[0] // NUM_THREADS,
        )
        if self._affine is None:
            self._library.run_dense(self._is_bf16, *launch)
        else:
            self._library.run_affine(self._is_bf16, *self._affine, *launch)
        for output in outputs:
            output.check()
        return [
            mx.array(output.values).view(dtype).reshape(shape)
            for output, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]


class _Placed:
    """An array `shift` 16-bit elements behind a 16-byte boundary, with poison before and behind it."""

    def __init__(self, values: np.ndarray[Any, Any], shift: int = 0) -> None:
        self._memory = np.full((values.nbytes + 3 * _PADDING) // 2, _POISON, np.uint16)
        first = -self._memory.ctypes.data % _PADDING // 2 + _PADDING // 2 + shift
        self._inside = slice(first, first + values.nbytes // 2)
        self.values = self._memory[self._inside].view(values.dtype).reshape(values.shape)
        self.values[...] = values
        self.address = int(self.values.ctypes.data)

    def check(self) -> None:
        """Fails if something was written outside."""
        outside = np.delete(self._memory, self._inside)
        assert np.all(outside == _POISON)


def _words(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array if array.dtype == mx.uint32 else array.view(mx.uint16))

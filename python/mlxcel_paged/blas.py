"""Which BLAS MLX's CPU backend multiplies matrices with, and an optimised one if it can be had.

The Linux wheel of MLX links a reference BLAS, 30 to 60 times slower than OpenBLAS. `prepare()` puts OpenBLAS in front
of it. That works only before the first `import mlx.core`: the dynamic linker binds MLX's symbols when MLX is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxcel_paged import _core

logger = logging.getLogger("mlxcel_paged")

CURE = "pip install scipy-openblas32, or install the system's OpenBLAS (Debian: libopenblas0)"
SYSTEM_LIBRARY = "libopenblas.so.0"


@dataclass(frozen=True, slots=True)
class BlasStatus:
    """What `prepare` did, and what `status` found."""

    library: str
    """`scipy-openblas32`, `libopenblas.so.0`, `preloaded`, `accelerate`, or `mlx` for the one in MLX's wheel."""
    path: str | None
    """File of the library, where it is known."""
    is_optimized: bool
    """False for MLX's own on Linux."""
    config: str | None = None
    """OpenBLAS's description of itself."""
    is_verified: bool | None = None
    """True if a matrix product through MLX went to the library and came out right; None while MLX is not loaded."""
    gemm_gflops: float | None = None
    """Rate of that product, 10^9 f32 operations per second."""
    hint: str | None = None
    """What to do, where something should be done."""


_prepared: list[BlasStatus] = []
_told: set[str] = set()


def prepare() -> BlasStatus:
    """Puts an optimised BLAS under MLX's CPU backend. Call it before the first `import mlx.core`.

    Never fails and does its work once. What keeps MLX slow is logged as a warning, once per process.
    """
    if not _prepared:
        _prepared.append(_prepare())
    return _prepared[0]


def status() -> BlasStatus:
    """Returns the BLAS in use. If MLX is loaded, it multiplies two small matrices to see where they go."""
    found = _prepared[0] if _prepared else _inspect()
    mx = sys.modules.get("mlx.core")
    return found if mx is None else _verify(found, mx)


def _inspect() -> BlasStatus:
    """Says what is there without changing it."""
    if sys.platform == "darwin":
        return BlasStatus("accelerate", None, is_optimized=True)
    path = _core.global_blas_path()
    if path is not None and not _is_core(path):
        return BlasStatus("preloaded", path, is_optimized=True)
    return BlasStatus("mlx", None, is_optimized=False, hint="call mlxcel_paged.blas.prepare() before importing mlx")


def _prepare() -> BlasStatus:
    found = _inspect()
    if found.is_optimized or not sys.platform.startswith("linux"):
        return found
    if "mlx.core" in sys.modules:
        hint = "import mlxcel_paged and call mlxcel_paged.blas.prepare() before importing mlx"
        _tell_once(f"MLX was imported before its BLAS could be replaced, so CPU matrix products stay slow: {hint}")
        return replace(found, hint=hint)
    prepared = _use_scipy_openblas() or _use_system_openblas()
    if prepared is not None:
        return prepared
    _tell_once(f"no optimised BLAS was found, so CPU matrix products are 30 to 60 times slower than need be: {CURE}")
    return replace(found, hint=CURE)


def _use_scipy_openblas() -> BlasStatus | None:
    path = _scipy_openblas_path()
    if path is None:
        return None
    try:
        config = _core.install_blas(str(path))
        # Already loaded: only moves the module's symbols to the scope where MLX's are looked up first.
        ctypes.CDLL(_core.__file__, mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD)
    except (_core.PagedError, OSError) as error:
        logger.warning("scipy-openblas32 is installed but cannot be used: %s", error)
        return None
    if not _is_core(_core.global_blas_path()):
        return None
    return BlasStatus("scipy-openblas32", str(path), is_optimized=True, config=config)


def _scipy_openblas_path() -> Path | None:
    # Looked up, not imported: an import would load the library into the global scope.
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("lib/libscipy_openblas*.so*"))), None)


def _use_system_openblas() -> BlasStatus | None:
    try:
        library = ctypes.CDLL(SYSTEM_LIBRARY, mode=os.RTLD_GLOBAL)
        get_config = library.openblas_get_config
    except (OSError, AttributeError):
        return None
    get_config.restype = ctypes.c_char_p
    config = get_config().decode(errors="replace").strip()
    return BlasStatus(SYSTEM_LIBRARY, _core.global_blas_path(), is_optimized=True, config=config)


def _verify(found: BlasStatus, mx: Any) -> BlasStatus:
    """Multiplies integer matrices, whose product is exact in f32, on MLX's CPU device."""
    size = 256
    try:
        a = mx.remainder(mx.arange(size * size, stream=mx.cpu), 7, stream=mx.cpu).astype(mx.float32, stream=mx.cpu)
        a = a.reshape(size, size, stream=mx.cpu)
        ones = mx.ones((size, size), dtype=mx.float32, stream=mx.cpu)
        expected = mx.sum(a, axis=1, keepdims=True, stream=mx.cpu)
        mx.eval(a, ones, expected)
        num_calls = _core.blas_num_calls()
        seconds = float("inf")
        is_right = True
        for _ in range(3):
            start = time.perf_counter()
            product = mx.matmul(a, ones, stream=mx.cpu)
            mx.eval(product)
            seconds = min(seconds, time.perf_counter() - start)
            is_right &= bool(mx.all(mx.equal(product, expected, stream=mx.cpu), stream=mx.cpu).item())
        was_called = _core.blas_num_calls() > num_calls
    except (RuntimeError, ValueError, TypeError) as error:
        return replace(found, is_verified=False, hint=f"a matrix product on MLX's CPU device failed: {error}")
    goes_there = was_called == (found.library == "scipy-openblas32")
    return replace(found, is_verified=is_right and goes_there, gemm_gflops=2 * size**3 / seconds / 1e9)


def _is_core(path: str | None) -> bool:
    return path is not None and os.path.realpath(path) == os.path.realpath(_core.__file__)


def _tell_once(message: str) -> None:
    if message not in _told:
        _told.add(message)
        logger.warning(message)

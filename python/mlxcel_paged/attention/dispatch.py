"""Chooses the path of attention launches: the fused kernel, or the gather fallback and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlxcel_paged import env
from mlxcel_paged.attention.cuda.library import cuda_kernels

Arm = Literal["auto", "fused", "gather"]
FusedBackend = Literal["cpu", "cuda"]

# What the kernels are validated for; tests/attention covers the product.
HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP_SIZE = 16
MIN_PAGE_SIZE, MAX_PAGE_SIZE = 8, 128
DTYPES: dict[FusedBackend, tuple[mx.Dtype, ...]] = {
    "cpu": (mx.float32, mx.float16, mx.bfloat16),
    "cuda": (mx.float16, mx.bfloat16),
}


@dataclass(frozen=True, slots=True)
class Path:
    """Whether launches are fused, and the outcome they count as."""

    is_fused: bool
    outcome: str


FUSED = Path(True, "fused")
_FORCED = Path(False, "gather:forced")
_KILL_SWITCH = Path(False, "gather:kill_switch")
_NO_KERNEL = Path(False, "gather:no_kernel")
_UNSUPPORTED_SHAPE = Path(False, "gather:unsupported_shape")
_UNSUPPORTED_DTYPE = Path(False, "gather:unsupported_dtype")
_UNSUPPORTED_PAGE_SIZE = Path(False, "gather:unsupported_page_size")


def choose_path(
    *,
    arm: Arm,
    backend: FusedBackend | None,
    dtype: mx.Dtype,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
) -> Path:
    """Returns the path of a launch of this shape. The environment's kill switch is read anew each time.

    The validated matrix is all that the kernels can serve, so forcing and policy agree.

    Args:
        backend: Whose fused kernels run here; None if nobody's.
    """
    if arm == "gather":
        return _FORCED
    if env.native_attention() is env.NativeAttention.OFF:
        return _KILL_SWITCH
    return shape_path(
        backend=backend,
        dtype=dtype,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
    )


def shape_path(
    *,
    backend: FusedBackend | None,
    dtype: mx.Dtype,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
) -> Path:
    """As `choose_path`, by the shape alone."""
    if backend is None:
        return _NO_KERNEL
    if dtype not in DTYPES[backend]:
        return _UNSUPPORTED_DTYPE
    if backend == "cuda" and page_size & (page_size - 1):
        return _UNSUPPORTED_PAGE_SIZE
    if not is_servable(num_qo_heads, num_kv_heads, head_dim, page_size):
        return _UNSUPPORTED_SHAPE
    return FUSED


def fused_backend(device: str) -> FusedBackend | None:
    """Whose fused kernels run on `device` (`"cpu"` or `"gpu"`); None if nobody's."""
    if device == "cpu":
        return "cpu"
    return None if cuda_kernels() is None else "cuda"


def is_servable(num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> bool:
    """Whether the fused kernels serve this shape."""
    return (
        num_qo_heads % num_kv_heads == 0
        and num_qo_heads // num_kv_heads <= MAX_GROUP_SIZE
        and head_dim in HEAD_DIMS
        and MIN_PAGE_SIZE <= page_size <= MAX_PAGE_SIZE
    )

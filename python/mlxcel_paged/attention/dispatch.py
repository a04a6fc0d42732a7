"""Chooses the path of attention launches: the fused kernel, or the gather fallback and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlxcel_paged import env

Arm = Literal["auto", "fused", "gather"]

# What the kernels are validated for; tests/attention covers the product.
HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP_SIZE = 16
MIN_PAGE_SIZE, MAX_PAGE_SIZE = 8, 128
CPU_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


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


def choose_path(
    *,
    arm: Arm,
    on_cpu: bool,
    dtype: mx.Dtype,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
) -> Path:
    """Returns the path of a launch of this shape. The environment's kill switch is read anew each time.

    On the CPU the validated matrix is all that the kernel can serve, so forcing and policy agree.
    """
    if arm == "gather":
        return _FORCED
    if env.native_attention() is env.NativeAttention.OFF:
        return _KILL_SWITCH
    if not on_cpu:
        return _NO_KERNEL
    if dtype not in CPU_DTYPES:
        return _UNSUPPORTED_DTYPE
    if not is_servable(num_qo_heads, num_kv_heads, head_dim, page_size):
        return _UNSUPPORTED_SHAPE
    return FUSED


def is_servable(num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> bool:
    """Whether the fused kernels serve this shape."""
    return (
        num_qo_heads % num_kv_heads == 0
        and num_qo_heads // num_kv_heads <= MAX_GROUP_SIZE
        and head_dim in HEAD_DIMS
        and MIN_PAGE_SIZE <= page_size <= MAX_PAGE_SIZE
    )

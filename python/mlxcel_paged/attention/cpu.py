"""The fused path on the CPU: the Rust kernel reads queries and pages through MLX's own buffers.

Steps are synchronous: the inputs are evaluated, the kernel borrows their memory for the time of the call, and its
output is copied into a fresh MLX array (a few kilobytes; MLX cannot adopt foreign memory on the CPU).
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_paged import _core
from mlxcel_paged.kvcache.handle import KeyHandle

CARRIER = {mx.float32: np.float32, mx.float16: np.float16, mx.bfloat16: np.uint16}


class CpuOutput:
    """Host memory that kernels write and MLX copies from: one allocation, which grows to the largest output."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._key: tuple[tuple[int, ...], mx.Dtype] | None = None
        self._buffer: np.ndarray[Any, Any] = self._memory

    def buffer(self, shape: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray[Any, Any]:
        """Returns a contiguous buffer, valid until the next call; bfloat16 is carried as uint16."""
        if self._key != (shape, dtype):
            num_bytes = math.prod(shape) * dtype.size
            if num_bytes > self._memory.nbytes:
                self._memory = np.empty(num_bytes, np.uint8)
            self._buffer = self._memory[:num_bytes].view(CARRIER[dtype]).reshape(shape)
            self._key = (shape, dtype)
        return self._buffer


def to_mlx(buffer: np.ndarray[Any, Any], dtype: mx.Dtype) -> mx.array:
    """Copies `buffer` into a new MLX array of `dtype`."""
    array = mx.array(buffer)
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array


def decode(
    plan: _core.DecodePlan,
    handle: KeyHandle,
    queries: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    output: CpuOutput,
    *,
    layout: str,
    scale: float,
    sinks: mx.array | None,
    logits_soft_cap: float,
) -> mx.array:
    """Runs one decode launch; `queries` and the result are `[batch, num_qo_heads, 1, head_dim]`.

    The handle's new tokens are written by the same call unless an earlier launch on it has done so.
    """
    q = queries.squeeze(2)
    k_new = v_new = None
    if handle.is_written:
        mx.eval(q)
    else:
        k_new, v_new = handle.k_new.squeeze(2), handle.v_new.squeeze(2)
        mx.eval(q, k_new, v_new)
    out = output.buffer(queries.shape, q.dtype)
    _core.cpu_paged_decode(
        plan,
        q,
        out[:, :, 0],
        k_pool,
        v_pool,
        k_new=k_new,
        v_new=v_new,
        layout=layout,
        sm_scale=scale,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
    )
    handle.is_written = True
    return to_mlx(out, q.dtype)


def prefill(
    handle: KeyHandle,
    queries: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    output: CpuOutput,
    *,
    page_ids: Any,
    num_tokens: int,
    layout: str,
    scale: float,
    sinks: mx.array | None,
    window: int | None,
    logits_soft_cap: float,
) -> mx.array:
    """Runs one layer of a prompt chunk; `queries` and the result are `[1, num_qo_heads, num_queries, head_dim]`."""
    q = queries[0].swapaxes(0, 1)
    k_new = v_new = None
    if handle.is_written:
        mx.eval(q)
    else:
        k_new, v_new = handle.k_new[0].swapaxes(0, 1), handle.v_new[0].swapaxes(0, 1)
        mx.eval(q, k_new, v_new)
    out = output.buffer(q.shape, q.dtype)
    _core.cpu_paged_prefill(
        q,
        out,
        k_pool,
        v_pool,
        page_ids=page_ids,
        first_page_offset=0,
        num_tokens=num_tokens,
        layout=layout,
        sm_scale=scale,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        window=window,
        k_new=k_new,
        v_new=v_new,
    )
    handle.is_written = True
    return to_mlx(out, q.dtype)[None].swapaxes(1, 2)

"""Decode launches of one KV group on an NVIDIA GPU: one kernel a layer, plan and workspace in device memory."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from mlxcel_paged import _core
from mlxcel_paged.attention.cuda.device_plan import DevicePlan
from mlxcel_paged.attention.cuda.library import CudaKernels
from mlxcel_paged.kernels_cuda.launch import OPTION_APPEND, OPTION_LSE, OPTION_SINKS
from mlxcel_paged.kvcache.handle import KeyHandle
from mlxcel_paged.kvcache.layout import KVGroup

_LOG2E = math.log2(math.e)


def workspace_bytes(plan: _core.DecodePlan, num_workers: int) -> int:
    """Bytes of device memory that a group's launches need beside the pools: plan, partials and counters."""
    mirror = _core.DeviceMirror(plan, num_workers)
    partials = mirror.max_partial_rows * plan.num_qo_heads * (plan.head_dim + 2)
    counters = plan.max_slots * plan.num_kv_heads
    return 4 * (mirror.num_table_words + 2 * mirror.num_state_words + partials + counters)


class CudaDecode:
    """Launches decode attention of the layers of one group.

    All launches of a model follow each other by their data, so one workspace serves them all.

    Args:
        plan: The group's plan.
        group: The group.
        page_size: Tokens in a page, a power of two.
        dtype: Dtype of queries and pools.
        kernels: The GPU's kernels.
    """

    def __init__(
        self, plan: _core.DecodePlan, group: KVGroup, page_size: int, dtype: mx.Dtype, kernels: CudaKernels
    ) -> None:
        num_workers = kernels.num_workers(group.num_kv_heads)
        group_size = group.num_qo_heads // group.num_kv_heads
        self.device_plan = DevicePlan(plan, num_workers, kernels.plan_step())
        mirror = self.device_plan.mirror
        self._kernel = kernels.decode(head_dim=group.head_dim, group_size=group_size, dtype=dtype)
        self._dtype = dtype
        self._num_blocks = (group.num_kv_heads, num_workers)
        self._num_heads = group.num_qo_heads
        self._partial_out = mx.zeros((mirror.max_partial_rows, group.num_qo_heads, group.head_dim), mx.float32)
        self._partial_state = mx.zeros((mirror.max_partial_rows, group.num_qo_heads, 2), mx.float32)
        self._arrivals = mx.zeros((plan.max_slots, group.num_kv_heads), mx.int32)
        mx.eval(self._partial_out, self._partial_state, self._arrivals)
        head_stride = page_size * group.head_dim
        self._geometry = (
            mirror.num_items,
            num_workers,
            group.num_kv_heads,
            group_size,
            page_size.bit_length() - 1,
            mirror.row_stride,
            group.num_qo_heads * group.head_dim,
            group.num_kv_heads * group.head_dim,
            group.num_kv_heads * head_stride,
            head_stride,
            group.head_dim,
            group.window or 0,
        )
        self._scalars: dict[tuple[float, float, int], tuple[int | float, ...]] = {}
        self._sinks: dict[int, tuple[mx.array, mx.array]] = {}

    def decode(
        self,
        handle: KeyHandle,
        queries: mx.array,
        k_view: mx.array,
        v_view: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        logits_soft_cap: float,
        return_lse: bool = False,
    ) -> tuple[mx.array, mx.array | None]:
        """Adds one launch; `queries` and the result are `[num_rows, num_qo_heads, 1, head_dim]`, the LSE
        `[num_rows, num_qo_heads]` float32.

        The handle's new tokens are written by the same launch unless an earlier one on it has done so.

        Args:
            k_view, v_view: Views that begin where the layer's pools do.
        """
        options = (
            (0 if handle.is_written else OPTION_APPEND)
            | (0 if sinks is None else OPTION_SINKS)
            | (OPTION_LSE if return_lse else 0)
        )
        plan = self.device_plan
        lse_shape = (queries.shape[0], self._num_heads)
        inputs = [
            queries,
            handle.k_new,
            handle.v_new,
            k_view,
            v_view,
            plan.table,
            plan.state,
            plan.state,  # offsets: rows are addressed from the start of their part of the table
            plan.work_items,
            self._arrivals if sinks is None else self._float_sinks(handle.layer, sinks),
            self._partial_out,
            self._partial_state,
            self._arrivals,
        ]
        if not return_lse:
            inputs.append(self._arrivals)  # stands for lse, which is not written
        outputs = self._kernel(
            inputs,
            (lse_shape, queries.shape) if return_lse else (queries.shape,),
            (mx.float32, self._dtype) if return_lse else (self._dtype,),
            self._launch_scalars(scale, logits_soft_cap, options),
            self._num_blocks,
        )
        handle.is_written = True
        return outputs[-1], outputs[0] if return_lse else None

    def _launch_scalars(self, scale: float, soft_cap: float, options: int) -> tuple[int | float, ...]:
        key = (scale, soft_cap, options)
        found = self._scalars.get(key)
        if found is None:
            floats = (
                scale if soft_cap else scale * _LOG2E,
                soft_cap * _LOG2E,
                2.0 * _LOG2E / soft_cap if soft_cap else 0.0,
            )
            # MLX takes a float by value only if it is one of float32.
            found = (*self._geometry, options, *(float(np.float32(value)) for value in floats))
            self._scalars[key] = found
        return found

    def _float_sinks(self, layer: int, sinks: mx.array) -> mx.array:
        """The layer's sinks in float32, converted once: they are weights."""
        found = self._sinks.get(layer)
        if found is None or found[0] is not sinks:
            found = (sinks, sinks.astype(mx.float32))
            mx.eval(found[1])
            self._sinks[layer] = found
        return found[1]

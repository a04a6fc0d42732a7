"""One launch of the decode kernel over a plan on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from mlxcel_paged import _core
from mlxcel_paged.attention.cuda.device_plan import DevicePlan
from mlxcel_paged.attention.cuda.kernel import Kernel
from mlxcel_paged.attention.cuda.library import CudaKernels
from mlxcel_paged.attention.cuda.pool_layout import PoolStrides
from mlxcel_paged.attention.rotation_tables import RotationTable
from mlxcel_paged.kernels_cuda.launch import OPTION_APPEND, OPTION_LSE, OPTION_SINKS, WORKSPACE_FILL
from mlxcel_paged.kernels_cuda.variant import RopeShape

_LOG2E = math.log2(math.e)
_MAX_FLOAT32 = float(np.finfo(np.float32).max)

_ScalarKey = tuple[PoolStrides, float, float, int]


class DecodeLaunch:
    """Launches over one plan, and the workspace that they share: they must follow each other on the device.

    Args:
        plan: The plan.
        device_plan: It on the device.
        dtype: Dtype of queries and pools.
        kernels: The GPU's kernels.
        ropes: What launches may be asked to apply.
    """

    def __init__(
        self,
        plan: _core.DecodePlan,
        device_plan: DevicePlan,
        dtype: mx.Dtype,
        kernels: CudaKernels,
        ropes: Iterable[RopeShape] = (),
    ) -> None:
        mirror = device_plan.mirror
        num_heads, num_kv_heads, head_dim = plan.num_qo_heads, plan.num_kv_heads, plan.head_dim
        group_size = num_heads // num_kv_heads
        self._device_plan = device_plan
        self._kernels: dict[RopeShape | None, Kernel] = {
            rope: kernels.decode(head_dim=head_dim, group_size=group_size, dtype=dtype, rope=rope)
            for rope in (None, *ropes)
        }
        self._dtype = dtype
        self._num_blocks = (num_kv_heads, mirror.num_workers)
        self._num_heads = num_heads
        self._partial_out = _fresh_workspace(mirror.max_partial_rows, num_heads, head_dim)
        self._partial_state = _fresh_workspace(mirror.max_partial_rows, num_heads, 2)
        self._arrivals = mx.zeros((plan.max_slots, num_kv_heads), mx.int32)
        mx.eval(self._partial_out, self._partial_state, self._arrivals)
        self._geometry = (
            mirror.num_items,
            mirror.num_workers,
            num_kv_heads,
            group_size,
            plan.page_size.bit_length() - 1,
            mirror.row_stride,
            num_heads * head_dim,
            num_kv_heads * head_dim,
        )
        self._window = plan.window or 0
        self._scalars: dict[_ScalarKey, tuple[int | float, ...]] = {}

    def __call__(
        self,
        queries: mx.array,
        k_new: mx.array,
        v_new: mx.array,
        k_view: mx.array,
        v_view: mx.array,
        *,
        strides: PoolStrides,
        append: bool,
        scale: float,
        sinks: mx.array | None,
        logits_soft_cap: float,
        return_lse: bool,
        rotations: RotationTable | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """Adds one launch; returns the result in `queries`' shape, and the LSE `[num_rows, num_qo_heads]` float32.

        Args:
            queries: `num_rows * num_qo_heads * head_dim` elements in this order.
            k_new, v_new: `num_rows * num_kv_heads * head_dim` elements in this order. Written to the pages with
                `append`; else not read, any array will do.
            k_view, v_view: Contiguous arrays that begin where the pools do.
            strides: Of both pools.
            sinks: `[num_qo_heads]` float32.
            rotations: RoPE that queries and new keys still need.
        """
        options = (
            (OPTION_APPEND if append else 0)
            | (0 if sinks is None else OPTION_SINKS)
            | (OPTION_LSE if return_lse else 0)
        )
        plan = self._device_plan
        inputs = [
            queries,
            k_new,
            v_new,
            k_view,
            v_view,
            plan.table,
            plan.state,
            plan.state,  # offsets: rows are addressed from the start of their part of the table
            plan.work_items,
            self._arrivals if sinks is None else sinks,
            self._arrivals if rotations is None else rotations.table,
            self._partial_out,
            self._partial_state,
            self._arrivals,
        ]
        if not return_lse:
            inputs.append(self._arrivals)  # stands for lse, which is not written
        lse_shape = (queries.shape[0], self._num_heads)
        outputs = self._kernels[None if rotations is None else rotations.shape](
            inputs,
            (lse_shape, queries.shape) if return_lse else (queries.shape,),
            (mx.float32, self._dtype) if return_lse else (self._dtype,),
            self._launch_scalars(strides, scale, logits_soft_cap, options),
            self._num_blocks,
        )
        return outputs[-1], outputs[0] if return_lse else None

    def _launch_scalars(
        self, strides: PoolStrides, scale: float, soft_cap: float, options: int
    ) -> tuple[int | float, ...]:
        key = (strides, scale, soft_cap, options)
        found = self._scalars.get(key)
        if found is None:
            floats = (
                scale if soft_cap else scale * _LOG2E,
                soft_cap * _LOG2E,
                2.0 * _LOG2E / soft_cap if soft_cap else 0.0,
            )
            found = (
                *self._geometry,
                strides.page,
                strides.head,
                strides.token,
                self._window,
                options,
                *(_float32(value) for value in floats),
            )
            self._scalars[key] = found
        return found


def _fresh_workspace(*shape: int) -> mx.array:
    """float32 with the bits that launches expect and leave."""
    return mx.full(shape, WORKSPACE_FILL, mx.int32).view(mx.float32)


def _float32(value: float) -> float:
    """The nearest finite float32: MLX takes no other by value, and an infinite factor would make NaN of a zero."""
    return float(np.float32(min(max(value, -_MAX_FLOAT32), _MAX_FLOAT32)))

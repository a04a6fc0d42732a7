"""Decode launches of one KV group of a model on an NVIDIA GPU: one kernel a layer, plan and workspace on the device."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from mlxcel_paged import _core
from mlxcel_paged.attention.cuda.decode_launch import DecodeLaunch
from mlxcel_paged.attention.cuda.device_plan import DevicePlan
from mlxcel_paged.attention.cuda.library import CudaKernels
from mlxcel_paged.attention.cuda.pool_layout import PoolStrides
from mlxcel_paged.attention.rotation_tables import RotationTable
from mlxcel_paged.kernels_cuda.variant import RopeShape
from mlxcel_paged.kvcache.handle import KeyHandle
from mlxcel_paged.kvcache.layout import KVGroup
from mlxcel_paged.kvcache.pools import LAYOUT


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
        ropes: What the layers' launches may be asked to apply.
    """

    def __init__(
        self,
        plan: _core.DecodePlan,
        group: KVGroup,
        page_size: int,
        dtype: mx.Dtype,
        kernels: CudaKernels,
        ropes: Iterable[RopeShape] = (),
    ) -> None:
        self.device_plan = DevicePlan(plan, kernels.num_workers(group.num_kv_heads), kernels.plan_step())
        self._launch = DecodeLaunch(plan, self.device_plan, dtype, kernels, ropes)
        self._strides = PoolStrides.dense(
            LAYOUT, num_kv_heads=group.num_kv_heads, page_size=page_size, head_dim=group.head_dim
        )
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
        rotations: RotationTable | None,
    ) -> mx.array:
        """Adds one launch; `queries` and the result are `[num_rows, num_qo_heads, 1, head_dim]`.

        The handle's new tokens are written by the same launch unless an earlier one on it has done so.

        Args:
            k_view, v_view: Views that begin where the layer's pools do.
            rotations: RoPE that the queries and the handle's keys still need.
        """
        out, _ = self._launch(
            queries,
            handle.k_new,
            handle.v_new,
            k_view,
            v_view,
            strides=self._strides,
            append=not handle.is_written,
            scale=scale,
            sinks=None if sinks is None else self._float_sinks(handle.layer, sinks),
            logits_soft_cap=logits_soft_cap,
            return_lse=False,
            rotations=rotations,
        )
        handle.is_written = True
        return out

    def _float_sinks(self, layer: int, sinks: mx.array) -> mx.array:
        """The layer's sinks in float32, converted once: they are weights."""
        found = self._sinks.get(layer)
        if found is None or found[0] is not sinks:
            found = (sinks, sinks.astype(mx.float32))
            mx.eval(found[1])
            self._sinks[layer] = found
        return found[1]

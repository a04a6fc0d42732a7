"""A plan of the public API on an NVIDIA GPU: any pools, any number of layers and of steps between two of them."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxcel_paged import _core
from mlxcel_paged.attention.cuda.decode_launch import DecodeLaunch
from mlxcel_paged.attention.cuda.device_plan import DevicePlan
from mlxcel_paged.attention.cuda.library import CudaKernels
from mlxcel_paged.attention.cuda.pool_layout import place
from mlxcel_paged.attention.decode_call import DecodeCall, Result


@dataclass(slots=True)
class _OnDevice:
    """The plan on the device for launches of one dtype, as of one epoch."""

    plan: DevicePlan
    launch: DecodeLaunch
    epoch: int


class PlannedDecode:
    """Launches of one plan. The device's copy follows the plan when the next launch is made.

    Every launch is sent to the device before it returns, so that launches, which share a workspace, follow each other
    whether their results depend on each other or not. All are to be made on one MLX stream.

    Args:
        plan: The plan; with at least one row.
        kernels: The GPU's kernels.
    """

    def __init__(self, plan: _core.DecodePlan, kernels: CudaKernels) -> None:
        self._plan = plan
        self._kernels = kernels
        self._on_device: dict[mx.Dtype, _OnDevice] = {}

    def run(self, call: DecodeCall, k_new: mx.array | None, v_new: mx.array | None) -> Result:
        """Sends one launch once its inputs are there; waits for it if it writes new tokens, of which MLX does not know.

        Raises:
            InvalidArgumentError: The pools cannot be written in place. Nothing is written then.
        """
        append = k_new is not None and v_new is not None
        rows = (call.q, call.q if k_new is None else k_new, call.q if v_new is None else v_new)
        addresses = self._kernels.array_addresses()
        placed = place(rows, call.k_pages, call.v_pages, call.layout, addresses, in_place=append)
        launch = self._current(call.q.dtype)
        queries, k_rows, v_rows = placed.rows
        out, lse = launch(
            queries,
            k_rows,
            v_rows,
            placed.k_view,
            placed.v_view,
            strides=placed.strides,
            append=append,
            scale=call.sm_scale,
            sinks=None if call.sinks is None else call.sinks.astype(mx.float32),
            logits_soft_cap=call.logits_soft_cap,
            return_lse=call.return_lse,
        )
        outputs = [out] if lse is None else [out, lse]
        if append:
            mx.eval(outputs)
        else:
            mx.async_eval(outputs)  # type: ignore[no-untyped-call]
        return out, lse

    def _current(self, dtype: mx.Dtype) -> DecodeLaunch:
        """The launch of `dtype`, over the plan as it is now."""
        plan, kernels = self._plan, self._kernels
        # A step that fails half-way leaves nothing behind that the next one would build on.
        found = self._on_device.pop(dtype, None)
        epoch = int(plan.epoch)
        if found is None:
            device_plan = DevicePlan(plan, kernels.num_workers(plan.num_kv_heads), kernels.plan_step())
            device_plan.load()
            found = _OnDevice(device_plan, DecodeLaunch(plan, device_plan, dtype, kernels), epoch)
        elif found.epoch != epoch:
            found.plan.step(plan.num_rows, found.plan.state)
            found.epoch = epoch
        self._on_device[dtype] = found
        return found.launch

"""One decode step of a batch: a token per row, every layer one launch over all rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np

from mlxcel_paged import _core
from mlxcel_paged.attention import cpu
from mlxcel_paged.attention.dispatch import Arm, Path, choose_path
from mlxcel_paged.attention.gather import GatherIndex, gather_decode, gather_index
from mlxcel_paged.attention.outcomes import Outcomes
from mlxcel_paged.attention.page_write import places_of_plan, write_decode
from mlxcel_paged.kvcache.handle import KeyHandle
from mlxcel_paged.kvcache.pools import LAYOUT, KVPools


class DecodeStep:
    """The step that all decode passes of one model share; `begin` makes it stand for the next pass."""

    def __init__(self, pools: KVPools, plans: Sequence[_core.DecodePlan], outcomes: Outcomes, arm: Arm) -> None:
        self.offset: int | mx.array = 0
        self._pools = pools
        self._plans = list(plans)
        self._groups = pools.layout.groups
        self._group_of_layer = pools.layout.group_of_layer
        self._outcomes = outcomes
        self._arm = arm
        self._positions = np.asarray(self._plans[0].positions)
        self._row_slots = np.asarray(self._plans[0].row_slots)
        self._output = cpu.CpuOutput()
        self._paths: list[Path] = []
        self._gather_indices: dict[int, GatherIndex] = {}
        self._places: dict[int, mx.array] = {}

    def begin(self) -> int:
        """Takes positions and paths from the plans, which are already advanced, and returns the number of rows."""
        plan = self._plans[0]
        num_rows = plan.num_rows
        # A plan's position is that of the next token, and the newest one is already counted.
        self.offset = mx.array(self._positions[self._row_slots[:num_rows]] - 1)
        self._paths = [
            choose_path(
                arm=self._arm,
                on_cpu=self._pools.on_cpu,
                dtype=self._pools.dtype,
                num_qo_heads=group.num_qo_heads,
                num_kv_heads=group.num_kv_heads,
                head_dim=group.head_dim,
                page_size=self._pools.page_size,
            )
            for group in self._groups
        ]
        self._gather_indices.clear()
        self._places.clear()
        return int(num_rows)

    def attend(
        self,
        handle: KeyHandle,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        logits_soft_cap: float,
    ) -> mx.array:
        """Launches one layer; see `mlxcel_paged.kvcache.step.Step`."""
        layer = handle.layer
        group = self._group_of_layer[layer]
        path = self._paths[group]
        plan = self._plans[group]
        k_pool, v_pool = self._pools.k(layer), self._pools.v(layer)
        self._outcomes.count_decode(path.outcome)
        if path.is_fused:
            return cpu.decode(
                plan,
                handle,
                queries,
                k_pool,
                v_pool,
                self._output,
                layout=LAYOUT,
                scale=scale,
                sinks=sinks,
                logits_soft_cap=logits_soft_cap,
            )
        if not handle.is_written:
            self._write(handle, group)
        return gather_decode(
            queries,
            k_pool,
            v_pool,
            self._gather_index(group),
            layout=LAYOUT,
            scale=scale,
            sinks=sinks,
            logits_soft_cap=logits_soft_cap,
            order_token=handle.order_token,
        )[0]

    def _write(self, handle: KeyHandle, group: int) -> None:
        """Writes the pass's new tokens for the gather path."""
        pools, layer = self._pools, handle.layer
        k_new, v_new = handle.k_new.squeeze(2), handle.v_new.squeeze(2)
        if pools.page_kernels is None:
            plan = self._plans[group]
            write_decode(plan, k_new, v_new, pools.k(layer), pools.v(layer), layout=LAYOUT, on_cpu=pools.on_cpu)
        else:
            places = self._places.get(group)
            if places is None:
                places = mx.array(places_of_plan(self._plans[group], pools.page_size))
                self._places[group] = places
            handle.order_token = pools.page_kernels.write(
                pools.view_k(layer), pools.view_v(layer), k_new, v_new, places
            )
        handle.is_written = True

    def _gather_index(self, group: int) -> GatherIndex:
        found = self._gather_indices.get(group)
        if found is None:
            found = index_of_plan(self._plans[group], self._pools.page_size, self._groups[group].window)
            self._gather_indices[group] = found
        return found


def index_of_plan(plan: _core.DecodePlan, page_size: int, window: int | None) -> GatherIndex:
    """What the gather path reads for `plan`."""
    csr = plan.export_csr()
    indptr, indices = np.asarray(csr.indptr), np.asarray(csr.indices)
    rows = [indices[begin:end] for begin, end in pairwise(indptr)]
    return gather_index(rows, np.asarray(csr.first_page_offset), np.asarray(csr.lengths), page_size, window)

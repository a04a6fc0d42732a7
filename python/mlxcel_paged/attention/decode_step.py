"""One decode step of a batch: a token per row, every layer one launch over all rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np

from mlxcel_paged import _core
from mlxcel_paged.attention import cpu
from mlxcel_paged.attention.cuda.decode import CudaDecode
from mlxcel_paged.attention.dispatch import Arm, FusedBackend, Path, choose_path
from mlxcel_paged.attention.gather import GatherIndex, gather_decode, gather_index
from mlxcel_paged.attention.outcomes import Outcomes
from mlxcel_paged.attention.page_write import places_of_plan, write_decode
from mlxcel_paged.attention.rotation_tables import RotationTables
from mlxcel_paged.kvcache.handle import KeyHandle
from mlxcel_paged.kvcache.pools import LAYOUT, KVPools
from mlxcel_paged.kvcache.rotation import begin_deferring, end_deferring


class DecodeStep:
    """The step that all decode passes of one model share; a pass is between `begin` and `end`.

    Args:
        pools: The model's pages.
        plans: The plan of every group.
        outcomes: Counts the launches.
        arm: Which path is wanted.
        cuda: The launches of every group on an NVIDIA GPU; None elsewhere.
        defers_rope: The model's RoPE may be left to launches on an NVIDIA GPU, which know its shapes.
    """

    def __init__(
        self,
        pools: KVPools,
        plans: Sequence[_core.DecodePlan],
        outcomes: Outcomes,
        arm: Arm,
        cuda: Sequence[CudaDecode | None] | None = None,
        *,
        defers_rope: bool = False,
    ) -> None:
        self.offset: int | mx.array = 0
        self._pools = pools
        self._plans = list(plans)
        self._cuda = list(cuda) if cuda is not None else [None] * len(self._plans)
        self._backend: FusedBackend | None = "cpu" if pools.on_cpu else None if cuda is None else "cuda"
        self._groups = pools.layout.groups
        self._group_of_layer = pools.layout.group_of_layer
        self._outcomes = outcomes
        self._arm = arm
        self._defers_rope = defers_rope
        self._rotations = RotationTables()
        self._positions = np.asarray(self._plans[0].positions)
        self._row_slots = np.asarray(self._plans[0].row_slots)
        self._output = cpu.CpuOutput()
        self._paths: list[Path] = []
        self._may_pad = False
        self._gather_indices: dict[int, GatherIndex] = {}
        self._places: dict[int, mx.array] = {}
        self._last_output: mx.array | None = None  # of the last launch, on CUDA
        self._output_before: mx.array | None = None  # `_last_output` when the last pass began

    def choose_paths(self) -> bool:
        """Chooses the path of every group for the coming pass.

        Returns:
            Whether the pass may have padding rows behind those of the plans.
        """
        self._paths = [
            choose_path(
                arm=self._arm,
                backend=self._backend,
                dtype=self._pools.dtype,
                num_qo_heads=group.num_qo_heads,
                num_kv_heads=group.num_kv_heads,
                head_dim=group.head_dim,
                page_size=self._pools.page_size,
            )
            for group in self._groups
        ]
        self._may_pad = self._backend == "cuda" and all(path.is_fused for path in self._paths)
        return self._may_pad

    def begin(self, tokens: mx.array) -> None:
        """Takes the rows' positions from the plans, which are already advanced. The paths are chosen.

        Args:
            tokens: `[num_rows]` int32, the newest token of every row, padding included.

        Raises:
            ValueError: Not as many as the plans have rows; more are padding where that is allowed.
        """
        self._output_before = self._last_output
        # Where padding is allowed, the device's mirrors look at the number anyway.
        if not self._may_pad and tokens.shape[0] != (num_rows := self._plans[0].num_rows):
            raise ValueError(f"tokens must be one per row of the plan, {num_rows}: got shape {tokens.shape}")
        self._gather_indices.clear()
        self._places.clear()
        on_device = [
            # All launches share workspaces, so the next pass comes after this one even if its tokens do not.
            cuda.device_plan.step(tokens.shape[0], tokens if self._last_output is None else self._last_output)
            for cuda, path in zip(self._cuda, self._paths, strict=True)
            if cuda is not None and path.is_fused
        ]
        if len(on_device) == len(self._plans):
            self.offset = on_device[0]
            if self._defers_rope:
                self._rotations.begin(self.offset)
                begin_deferring(self.offset)
        else:
            # A plan's position is that of the next token, and the newest one is already counted.
            self.offset = mx.array(self._positions[self._row_slots[: tokens.shape[0]]] - 1)

    def drop(self) -> None:
        """Lets nothing come after the launches of the last pass, which nobody will evaluate then: they write tokens to
        pages that are other sequences' once the pass has failed. Waits for those that are under way already, as when
        memory has run out in the middle: the next pass uses their workspaces."""
        self._last_output = self._output_before
        if self._backend == "cuda":
            mx.synchronize()

    def end(self) -> None:
        """Ends the pass, also one that has failed."""
        end_deferring()
        self._rotations.begin(None)

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
        pools = self._pools
        group = self._group_of_layer[layer]
        path = self._paths[group]
        self._outcomes.count_decode(path.outcome)
        if path.is_fused:
            cuda = self._cuda[group]
            if cuda is not None:
                self._last_output = cuda.decode(
                    handle,
                    queries,
                    pools.view_k(layer),
                    pools.view_v(layer),
                    scale=scale,
                    sinks=sinks,
                    logits_soft_cap=logits_soft_cap,
                    rotations=None if handle.rotation is None else self._rotations.of(handle.rotation),
                )
                return self._last_output
            return cpu.decode(
                self._plans[group],
                handle,
                queries,
                pools.k(layer),
                pools.v(layer),
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
            pools.k(layer),
            pools.v(layer),
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

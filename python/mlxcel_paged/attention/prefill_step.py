"""One chunk of one prompt: the new tokens are written to their pages and attend causally to all before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_paged import _core
from mlxcel_paged.attention import cpu
from mlxcel_paged.attention.cuda.prefill import CudaPrefillStep
from mlxcel_paged.attention.dispatch import Arm, Path, choose_path
from mlxcel_paged.attention.gather import GatherIndex, gather_prefill, prefill_index
from mlxcel_paged.attention.outcomes import WRITE_ONLY, Outcomes
from mlxcel_paged.attention.page_write import write_tokens
from mlxcel_paged.kvcache.handle import KeyHandle
from mlxcel_paged.kvcache.pools import LAYOUT, KVPools


def prefill_step(pools: KVPools, outcomes: Outcomes, arm: Arm) -> PrefillStep | CudaPrefillStep:
    """The step for prompt chunks on the pools' device."""
    if pools.page_kernels is not None:
        return CudaPrefillStep(pools, pools.page_kernels, outcomes)
    return PrefillStep(pools, outcomes, arm)


class PrefillStep:
    """The step that all prompt chunks of one model share; `begin` makes it stand for the next one, `finish` runs it."""

    def __init__(self, pools: KVPools, outcomes: Outcomes, arm: Arm) -> None:
        self.offset: int | mx.array = 0
        self._pools = pools
        self._outcomes = outcomes
        self._arm = arm
        self._is_complete = False
        self._last_layer = pools.layout.num_layers - 1
        self._output = cpu.CpuOutput()
        self._paths: list[Path] = []
        self._page_ids: list[np.ndarray[Any, Any]] = []
        self._num_tokens: list[int] = []
        self._gather_indices: dict[int, GatherIndex] = {}

    def begin(self, tables: Sequence[_core.PageTable], start: int) -> None:
        """Stands for the chunk that begins at position `start`; `tables`, one per group, already count its tokens."""
        pools = self._pools
        self.offset = start
        self._is_complete = False
        self._gather_indices.clear()
        self._page_ids = [np.array(table.pages, np.int32) for table in tables]
        self._num_tokens = [table.num_held_tokens for table in tables]
        self._paths = [
            choose_path(
                arm=self._arm,
                backend="cpu" if pools.on_cpu else None,
                dtype=pools.dtype,
                num_qo_heads=group.num_qo_heads,
                num_kv_heads=group.num_kv_heads,
                head_dim=group.head_dim,
                page_size=pools.page_size,
            )
            for group in pools.layout.groups
        ]

    def attend(
        self,
        handle: KeyHandle,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        logits_soft_cap: float,
    ) -> mx.array:
        """Launches one layer; see `mlxcel_paged.kvcache.step.Step`.

        After the last layer has written its tokens nothing of the pass is needed any more, so what is returned from
        there on only has the right shape, and whatever the model builds on it is never evaluated.
        """
        if self._is_complete:
            return queries
        layer = handle.layer
        group_index = self._pools.layout.group_of_layer[layer]
        group, path = self._pools.layout.groups[group_index], self._paths[group_index]
        page_ids, num_tokens = self._page_ids[group_index], self._num_tokens[group_index]
        k_pool, v_pool = self._pools.k(layer), self._pools.v(layer)
        is_last = layer == self._last_layer
        if not handle.is_written and (is_last or not path.is_fused):
            write_tokens(
                _tokens_first(handle.k_new),
                _tokens_first(handle.v_new),
                k_pool,
                v_pool,
                page_ids=page_ids,
                num_tokens=num_tokens,
                layout=LAYOUT,
                on_cpu=self._pools.on_cpu,
            )
            handle.is_written = True
        if is_last:
            self._is_complete = True
            self._outcomes.count_prefill(WRITE_ONLY)
            return queries
        self._outcomes.count_prefill(path.outcome)
        if path.is_fused:
            return cpu.prefill(
                handle,
                queries,
                k_pool,
                v_pool,
                self._output,
                page_ids=page_ids,
                num_tokens=num_tokens,
                layout=LAYOUT,
                scale=scale,
                sinks=sinks,
                window=group.window,
                logits_soft_cap=logits_soft_cap,
            )
        return gather_prefill(
            queries,
            k_pool,
            v_pool,
            self._gather_index(group_index, queries.shape[2]),
            layout=LAYOUT,
            scale=scale,
            sinks=sinks,
            logits_soft_cap=logits_soft_cap,
        )

    def finish(self) -> None:
        """Runs what the pass left to MLX."""
        self._pools.evaluate()

    def _gather_index(self, group: int, num_queries: int) -> GatherIndex:
        found = self._gather_indices.get(group)
        if found is None:
            window = self._pools.layout.groups[group].window
            found = prefill_index(self._page_ids[group], self._num_tokens[group], num_queries, window)
            self._gather_indices[group] = found
        return found


def _tokens_first(heads_first: mx.array) -> mx.array:
    """`[1, heads, tokens, dim]` as `[tokens, heads, dim]`, a view."""
    return heads_first[0].swapaxes(0, 1)

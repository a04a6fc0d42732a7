"""One chunk of one prompt on CUDA: the new tokens go to their pages in place and attend through MLX's own function.

The chunk's attention reads the tokens before it from their pages and its own from the arrays that the model made, so no
launch of the pass reads what another one writes, and nothing has to be ordered inside it. The writes' order tokens are
evaluated when the pass ends, without waiting; whatever runs later on the stream sees the pages.

Memory beyond the pools: MLX keeps what a kernel reads until the graph that holds the kernel has run, and lets the host
be about ten graphs ahead, which at the size of Llama 3.1 8B is one and a half passes. So many layers' activations are
alive together, and as many copies of keys and values of prefix and chunk: 4 KiB a token and layer there, 64 MiB a layer
at 16384 tokens. Smaller chunks need less of the former. What a chunk frees, the next one takes over: nobody waits for
a chunk to empty MLX's cache behind it, as mlx-lm does; `engine/decode_tokens.py` empties it once the next is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxcel_paged import _core
from mlxcel_paged.attention.chunk_attention import BandMasks, attend_chunk
from mlxcel_paged.attention.outcomes import CHUNK_SDPA, WRITE_ONLY, Outcomes
from mlxcel_paged.attention.page_write import places_of_tokens
from mlxcel_paged.kvcache.handle import KeyHandle
from mlxcel_paged.kvcache.page_kernels import PageKernels
from mlxcel_paged.kvcache.pools import KVPools


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk in the pages of one KV group.

    Attributes:
        page_ids: int32, all pages held.
        places: `[num_new]` int32, where the new tokens go.
        first_token: First token before the chunk that some query of it sees, counted in `page_ids`.
        num_prefix: Tokens from there to the chunk.
    """

    page_ids: mx.array
    places: mx.array
    first_token: int
    num_prefix: int


class CudaPrefillStep:
    """The step that all prompt chunks of one model share; `begin` makes it stand for the next one, `finish` runs it."""

    def __init__(self, pools: KVPools, page_kernels: PageKernels, outcomes: Outcomes) -> None:
        self.offset: int | mx.array = 0
        self._pools = pools
        self._kernels = page_kernels
        self._outcomes = outcomes
        self._is_complete = False
        self._last_layer = pools.layout.num_layers - 1
        self._tables: list[_core.PageTable] = []
        self._chunks: dict[int, _Chunk] = {}
        self._masks = BandMasks()
        self._order_tokens: list[mx.array] = []

    def begin(self, tables: Sequence[_core.PageTable], start: int) -> None:
        """Stands for the chunk that begins at position `start`; `tables`, one per group, already count its tokens."""
        self.offset = start
        self._is_complete = False
        self._tables = list(tables)
        self._chunks.clear()
        self._masks.clear()
        self._order_tokens.clear()

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
        pools = self._pools
        group = pools.layout.groups[pools.layout.group_of_layer[layer]]
        k_new, v_new = _tokens_first(handle.k_new), _tokens_first(handle.v_new)
        chunk = self._chunk(group.index, k_new.shape[0])
        k_view, v_view = pools.view_k(layer), pools.view_v(layer)
        if not handle.is_written:
            self._order_tokens.append(self._kernels.write(k_view, v_view, k_new, v_new, chunk.places))
            handle.is_written = True
        if layer == self._last_layer:
            self._is_complete = True
            self._outcomes.count_prefill(WRITE_ONLY)
            return queries
        self._outcomes.count_prefill(CHUNK_SDPA)
        keys, values = handle.k_new, handle.v_new
        if chunk.num_prefix:
            keys, values = self._kernels.gather(
                k_view,
                v_view,
                k_new,
                v_new,
                chunk.page_ids,
                first_token=chunk.first_token,
                num_prefix=chunk.num_prefix,
            )
        return attend_chunk(
            queries,
            keys,
            values,
            self._masks,
            window=group.window,
            scale=scale,
            sinks=sinks,
            logits_soft_cap=logits_soft_cap,
        )

    def finish(self) -> None:
        """Sends the pass to the device and does not wait for it."""
        mx.async_eval(self._order_tokens)  # type: ignore[no-untyped-call]
        self._order_tokens.clear()

    def _chunk(self, group: int, num_new: int) -> _Chunk:
        found = self._chunks.get(group)
        if found is None:
            table = self._tables[group]
            pages = np.array(table.pages, np.int32)
            window = self._pools.layout.groups[group].window
            num_before = table.num_held_tokens - num_new
            num_prefix = num_before if window is None else min(num_before, window - 1)
            places = places_of_tokens(pages, num_before, num_new, self._pools.page_size)
            found = _Chunk(mx.array(pages), mx.array(places), num_before - num_prefix, num_prefix)
            self._chunks[group] = found
        return found


def _tokens_first(heads_first: mx.array) -> mx.array:
    """`[1, heads, tokens, dim]` as `[tokens, heads, dim]`: how projections lay tokens out, so usually no copy."""
    return heads_first[0].swapaxes(0, 1)

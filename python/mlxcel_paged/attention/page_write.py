"""The append alone, for the gather path: new keys and values go to their pages.

On the CPU the Rust core writes through pointers. Where the device has page kernels (`kvcache.page_kernels`) they write
in place, to the places that are computed here; elsewhere MLX scatters. The scatter keeps the pool's array object but
may copy its memory while a reader is in flight.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_paged import _core
from mlxcel_paged.kvcache.layout import KVLayout

# What the core's vector code writes.
_CPU_HEAD_DIM_MULTIPLE, _CPU_MAX_HEAD_DIM = 16, 512

Array = np.ndarray[Any, Any]


def why_not_written_on_cpu(layout: KVLayout) -> str | None:
    """Why the core cannot write the tokens of some layer on the CPU; None if it can."""
    for group in layout.groups:
        if group.head_dim % _CPU_HEAD_DIM_MULTIPLE or group.head_dim > _CPU_MAX_HEAD_DIM:
            return (
                f"layer {group.layer_ids[0]} has head dim {group.head_dim}, and pages on the CPU take multiples of "
                f"{_CPU_HEAD_DIM_MULTIPLE} up to {_CPU_MAX_HEAD_DIM}"
            )
    return None


def write_decode(
    plan: _core.DecodePlan,
    k_new: mx.array,
    v_new: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    *,
    layout: str,
    on_cpu: bool,
) -> None:
    """Writes one token per row; `k_new` and `v_new` are `[batch, num_kv_heads, head_dim]`."""
    if on_cpu:
        mx.eval(k_new, v_new)
        _core.cpu_write_decode(plan, k_new, v_new, k_pool, v_pool, layout=layout)
        return
    csr = plan.export_csr()
    indptr, last_page_len = np.asarray(csr.indptr), np.asarray(csr.last_page_len)
    rows = np.flatnonzero(last_page_len)
    if len(rows) < len(last_page_len):
        k_new, v_new = k_new[mx.array(rows)], v_new[mx.array(rows)]
    pages = np.asarray(csr.indices)[indptr[rows + 1] - 1]
    scatter(pages, last_page_len[rows] - 1, k_new, v_new, k_pool, v_pool, layout=layout)


def write_tokens(
    k_new: mx.array,
    v_new: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    *,
    page_ids: Any,
    num_tokens: int,
    layout: str,
    on_cpu: bool,
) -> None:
    """Writes the last tokens of one sequence; `k_new` and `v_new` are `[new_tokens, num_kv_heads, head_dim]`."""
    if on_cpu:
        mx.eval(k_new, v_new)
        _core.cpu_write_pages(
            k_new, v_new, k_pool, v_pool, page_ids=page_ids, first_page_offset=0, num_tokens=num_tokens, layout=layout
        )
        return
    page_size = k_pool.shape[1 if layout == "NHD" else 2]
    place = np.arange(num_tokens - k_new.shape[0], num_tokens)
    scatter(page_ids[place // page_size], place % page_size, k_new, v_new, k_pool, v_pool, layout=layout)


def places_of_plan(plan: _core.DecodePlan, page_size: int) -> Array:
    """Where the newest token of every row goes: `[batch]` int32, page id * page_size + token in the page; -1 for an
    empty row."""
    csr = plan.export_csr()
    indptr, last_page_len = np.asarray(csr.indptr), np.asarray(csr.last_page_len)
    places = np.full(len(last_page_len), -1, np.int32)
    rows = np.flatnonzero(last_page_len)
    places[rows] = np.asarray(csr.indices)[indptr[rows + 1] - 1] * page_size + last_page_len[rows] - 1
    return places


def places_of_tokens(page_ids: Array, first_token: int, num_tokens: int, page_size: int) -> Array:
    """Where tokens `first_token` and on of the sequence in `page_ids` go: `[num_tokens]` int32, as in
    `places_of_plan`."""
    token = np.arange(first_token, first_token + num_tokens)
    places: Array = (page_ids[token // page_size] * page_size + token % page_size).astype(np.int32)
    return places


def scatter(
    pages: Array, slots: Array, k_new: mx.array, v_new: mx.array, k_pool: mx.array, v_pool: mx.array, *, layout: str
) -> None:
    """Writes token i to slot `slots[i]` of page `pages[i]` as an MLX update of the two pools."""
    page_index, slot_index = mx.array(pages), mx.array(slots)
    for pool, new in ((k_pool, k_new), (v_pool, v_new)):
        if layout == "NHD":
            pool[page_index, slot_index] = new.astype(pool.dtype)
        else:
            pool[page_index, :, slot_index] = new.astype(pool.dtype)

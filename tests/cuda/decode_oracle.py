"""Decode attention in f64, one token at a time through the page table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def visible_tokens(length: int, window: int | None) -> range:
    return range(max(0, length - window) if window else 0, length)


def decode(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_ids: list[list[int]],
    lengths: list[int],
    offsets: list[int],
    *,
    sm_scale: float,
    window: int | None,
    logits_soft_cap: float,
    sinks: Array | None,
) -> tuple[Array, Array]:
    """q [B, Hq, D], pages NHD [pages, page_size, Hkv, D] -> out [B, Hq, D], lse [B, Hq] in base 2."""
    num_rows, num_qo_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_pages.shape
    out = np.zeros((num_rows, num_qo_heads, head_dim))
    lse = np.full((num_rows, num_qo_heads), -np.inf)
    for row in range(num_rows):
        places = [
            (page_ids[row][(offsets[row] + token) // page_size], (offsets[row] + token) % page_size)
            for token in visible_tokens(lengths[row], window)
        ]
        pages, slots = (np.array(part, np.int64) for part in zip(*places, strict=True)) if places else ([], [])
        keys, values = k_pages[pages, slots], v_pages[pages, slots]
        for head in range(num_qo_heads):
            kv_head = head // (num_qo_heads // num_kv_heads)
            logits = keys[:, kv_head] @ q[row, head] * sm_scale if places else np.zeros(0)
            if logits_soft_cap:
                logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
            sink = [] if sinks is None else [sinks[head]]
            everything = np.concatenate([logits, sink])
            if everything.size == 0:
                continue
            top = everything.max()
            weights = np.exp(logits - top)
            total = np.exp(everything - top).sum()
            lse[row, head] = (top + np.log(total)) / np.log(2.0)
            if places:
                out[row, head] = weights @ values[:, kv_head] / total
    return out, lse

"""The oracle: decode attention in plain float64 NumPy that indexes pages one by one.

It shares nothing with the other backends, on purpose, and is written to be read beside the definition:
`out = sum_t softmax(cap(scale * q . k_t))_t v_t` over the visible tokens t, with a sink as one more logit without a
value.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def reference_decode(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    *,
    indptr: Array,
    indices: Array,
    last_page_len: Array,
    first_page_offset: Array,
    sm_scale: float,
    window: int | None,
    logits_soft_cap: float,
    sinks: Array | None,
    layout: str,
) -> tuple[Array, Array]:
    """Returns the output `[batch, num_qo_heads, head_dim]` and the base-2 LSE `[batch, num_qo_heads]`, both float64.

    Args:
        q: `[batch, num_qo_heads, head_dim]`.
        k_pages, v_pages: `[num_pages, page_size, num_kv_heads, head_dim]` for NHD, heads before tokens for HND.
        indptr, indices, last_page_len, first_page_offset: The CSR view of the batch.
        window: Visible tokens at most, the current one included.
        sinks: `[num_qo_heads]`, logits that take weight but carry no value.
    """
    batch, num_qo_heads, head_dim = q.shape
    heads_axis, tokens_axis = (2, 1) if layout == "NHD" else (1, 2)
    page_size, num_kv_heads = k_pages.shape[tokens_axis], k_pages.shape[heads_axis]
    out = np.zeros((batch, num_qo_heads, head_dim), np.float64)
    lse = np.full((batch, num_qo_heads), -math.inf)
    for row in range(batch):
        tokens = _tokens(row, indptr, indices, last_page_len, first_page_offset, page_size)
        visible = tokens if window is None else tokens[max(0, len(tokens) - window) :]
        for head in range(num_qo_heads):
            kv_head = head // (num_qo_heads // num_kv_heads)
            logits = []
            for page, slot in visible:
                key = k_pages[page, slot, kv_head] if layout == "NHD" else k_pages[page, kv_head, slot]
                logit = float(np.dot(q[row, head].astype(np.float64), key.astype(np.float64))) * sm_scale
                logits.append(logits_soft_cap * math.tanh(logit / logits_soft_cap) if logits_soft_cap else logit)
            everyone = logits if sinks is None else [*logits, float(sinks[head])]
            if not everyone:
                continue
            top = max(everyone)
            total = sum(math.exp(logit - top) for logit in everyone)
            lse[row, head] = (top + math.log(total)) * math.log2(math.e)
            for logit, (page, slot) in zip(logits, visible, strict=True):
                value = v_pages[page, slot, kv_head] if layout == "NHD" else v_pages[page, kv_head, slot]
                out[row, head] += math.exp(logit - top) / total * value.astype(np.float64)
    return out, lse


def _tokens(
    row: int, indptr: Array, indices: Array, last_page_len: Array, first_page_offset: Array, page_size: int
) -> list[tuple[int, int]]:
    """The row's tokens, oldest first, as (page, slot in the page)."""
    pages = [int(page) for page in indices[int(indptr[row]) : int(indptr[row + 1])]]
    tokens: list[tuple[int, int]] = []
    for place, page in enumerate(pages):
        begin = int(first_page_offset[row]) if place == 0 else 0
        end = int(last_page_len[row]) if place == len(pages) - 1 else page_size
        tokens.extend((page, slot) for slot in range(begin, end))
    return tokens

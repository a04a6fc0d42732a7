"""The gather path: visible pages are copied into one dense K and V, which MLX's own attention reads.

It serves every shape and device, and is what paging cost before the fused kernels. Bytes outside the visible tokens may
hold anything, NaN included: values are zeroed by select, scores masked by select.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class GatherIndex:
    """Which pages a batch of rows gathers and which of their tokens are visible.

    Attributes:
        page_ids: `[batch, max_pages]` int32; a row is padded with its own first page (0 for an empty row).
        visible: `[batch, 1, queries, tokens]` bool.
        is_empty: `[batch]` rows without a visible token; None if there is none.
    """

    page_ids: mx.array
    visible: mx.array
    is_empty: mx.array | None


def gather_index(
    rows: list[np.ndarray], first_page_offsets: np.ndarray, lengths: np.ndarray, page_size: int, window: int | None
) -> GatherIndex:
    """Builds the index of a decode batch.

    Args:
        rows: Page ids of every row.
        first_page_offsets, lengths: `[batch]`, place of the first token in the first page, tokens from there on.
        page_size: Tokens in a page.
        window: Visible tokens at most, counted from the last one; None for all.
    """
    max_pages = max(1, max((len(row) for row in rows), default=1))
    page_ids = np.zeros((len(rows), max_pages), np.int32)
    for index, row in enumerate(rows):
        if len(row):
            page_ids[index] = row[0]
            page_ids[index, : len(row)] = row
    ends = first_page_offsets.astype(np.int64) + lengths
    begins = first_page_offsets if window is None else np.maximum(first_page_offsets, ends - window)
    place = np.arange(max_pages * page_size)
    visible = (place >= begins[:, None]) & (place < ends[:, None])
    is_empty = mx.array(lengths == 0) if (lengths == 0).any() else None
    return GatherIndex(mx.array(page_ids), mx.array(visible)[:, None, None], is_empty)


def prefill_index(page_ids: np.ndarray, num_tokens: int, num_queries: int, window: int | None) -> GatherIndex:
    """Builds the index of a prompt chunk: the last `num_queries` of the `num_tokens` tokens held in `page_ids`."""
    position = np.arange(num_tokens - num_queries, num_tokens)[:, None]
    place = np.arange(num_tokens)
    visible = place <= position
    if window is not None:
        visible &= place > position - window
    return GatherIndex(mx.array(page_ids)[None], mx.array(visible)[None, None], None)


def gather_decode(
    queries: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    index: GatherIndex,
    *,
    layout: str,
    scale: float,
    sinks: mx.array | None = None,
    logits_soft_cap: float = 0.0,
    return_lse: bool = False,
    order_token: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """Attends one query token per row.

    Args:
        queries: `[batch, num_qo_heads, 1, head_dim]`.
        k_pool, v_pool: Pages in `layout`.
        order_token: What an in-place write to the pools returned that this launch has to see.

    Returns:
        The output in `queries`' shape and dtype, and the base-2 LSE `[batch, num_qo_heads]` float32 if asked for.
    """
    # The write is invisible to MLX; page ids that are computed from its token come after it on the device.
    page_ids = index.page_ids if order_token is None else index.page_ids + order_token
    keys = gather_pages(k_pool, page_ids, layout)
    values = gather_pages(v_pool, page_ids, layout)
    values = mx.where(index.visible.swapaxes(2, 3), values, mx.array(0, values.dtype))
    return _attend(queries, keys, values, index, scale, sinks, logits_soft_cap, return_lse)


def gather_prefill(
    queries: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    index: GatherIndex,
    *,
    layout: str,
    scale: float,
    sinks: mx.array | None = None,
    logits_soft_cap: float = 0.0,
) -> mx.array:
    """Attends the last tokens of one sequence, causally.

    Args:
        queries: `[1, num_qo_heads, num_queries, head_dim]`.
        k_pool, v_pool: Pages in `layout`; the tokens that the index sees are all written.
    """
    num_tokens = index.visible.shape[-1]
    keys = gather_pages(k_pool, index.page_ids, layout)[:, :, :num_tokens]
    values = gather_pages(v_pool, index.page_ids, layout)[:, :, :num_tokens]
    return _attend(queries, keys, values, index, scale, sinks, logits_soft_cap, False)[0]


def gather_pages(pool: mx.array, page_ids: mx.array, layout: str) -> mx.array:
    """Copies `page_ids` `[batch, pages]` out of `pool` as `[batch, num_kv_heads, pages * page_size, head_dim]`."""
    batch, num_pages = page_ids.shape
    pages = mx.take(pool, page_ids, axis=0)
    if layout == "NHD":
        _, _, page_size, num_heads, head_dim = pages.shape
        # MLX's CPU attention takes 10x as long on keys whose tokens lie apart as this copy does.
        return mx.contiguous(pages.reshape(batch, num_pages * page_size, num_heads, head_dim).swapaxes(1, 2))
    _, _, num_heads, page_size, head_dim = pages.shape
    return pages.swapaxes(1, 2).reshape(batch, num_heads, num_pages * page_size, head_dim)


def _attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    index: GatherIndex,
    scale: float,
    sinks: mx.array | None,
    logits_soft_cap: float,
    return_lse: bool,
) -> tuple[mx.array, mx.array | None]:
    dtype = queries.dtype
    if mx.default_device() == mx.cpu and dtype != mx.float32:
        # MLX's CPU attention keeps 16-bit scores: several times slower, and beyond the decode contract's tolerances.
        queries, keys, values = (array.astype(mx.float32) for array in (queries, keys, values))
        sinks = None if sinks is None else sinks.astype(mx.float32)
    lse = None
    if logits_soft_cap or return_lse:
        output, lse = explicit_attention(queries, keys, values, index.visible, scale, sinks, logits_soft_cap)
    else:
        sinks = None if sinks is None else sinks.astype(queries.dtype)
        output = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=index.visible, sinks=sinks
        )
    if index.is_empty is not None:
        output = mx.where(index.is_empty[:, None, None, None], mx.array(0, output.dtype), output)
    return output.astype(dtype), None if lse is None else lse[..., 0]


def explicit_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    visible: mx.array,
    scale: float,
    sinks: mx.array | None,
    logits_soft_cap: float,
) -> tuple[mx.array, mx.array]:
    """Attention in float32 with what MLX's fused function lacks: a cap on the logits, and the base-2 LSE."""
    batch, num_heads, num_queries, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    grouped = (queries.astype(mx.float32) * scale).reshape(batch, num_kv_heads, -1, num_queries, head_dim)
    scores = grouped @ keys.astype(mx.float32)[:, :, None].swapaxes(-1, -2)
    if logits_soft_cap:
        scores = logits_soft_cap * mx.tanh(scores / logits_soft_cap)
    scores = mx.where(visible[:, :, None], scores, mx.array(-math.inf, mx.float32))
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(mx.float32).reshape(1, num_kv_heads, -1, 1, 1)
        top = mx.maximum(top, sink)
    top = mx.where(top == -math.inf, mx.array(0.0), top)
    weights = mx.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sink - top)
    output = (weights @ values.astype(mx.float32)[:, :, None]) / mx.where(total == 0, mx.array(1.0), total)
    lse = (top + mx.log(total)) * _LOG2_E
    return output.reshape(queries.shape), lse.reshape(batch, num_heads, num_queries)

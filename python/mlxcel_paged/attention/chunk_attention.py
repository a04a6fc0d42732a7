"""Causal attention of a prompt chunk over dense keys and values, by MLX's own function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import mlx.core as mx

from mlxcel_paged.attention.gather import explicit_attention

# A window is a band in the square of queries and keys. Queries go in blocks, each over the keys that it can see: the
# rest of the square is neither computed nor, as a mask that MLX expands to all heads, stored.
WINDOW_BLOCK_TOKENS = 512


class BandMasks:
    """Masks of the last `num_queries` of `num_keys` tokens, made on the device and shared by the layers of a chunk."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int, int], mx.array] = {}

    def array(self, num_queries: int, num_keys: int, window: int | None) -> mx.array:
        """`[num_queries, num_keys]` bool: which keys a query sees."""
        key = (num_queries, num_keys, window or num_keys)
        found = self._masks.get(key)
        if found is None:
            query = mx.arange(num_keys - num_queries, num_keys)[:, None]
            token = mx.arange(num_keys)[None]
            found = (token <= query) & (token > query - key[2])
            self._masks[key] = found
        return found

    def for_mlx(self, num_queries: int, num_keys: int, window: int | None) -> mx.array | Literal["causal"]:
        """The same for `mx.fast.scaled_dot_product_attention`, whose causal mask ends at the last key as ours does."""
        if window is None or num_keys <= window:
            return "causal"
        return self.array(num_queries, num_keys, window)

    def clear(self) -> None:
        self._masks.clear()


def attend_chunk(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    masks: BandMasks,
    *,
    window: int | None,
    scale: float,
    sinks: mx.array | None,
    logits_soft_cap: float,
) -> mx.array:
    """Attends the last tokens of one sequence, causally.

    Args:
        queries: `[1, num_qo_heads, num_queries, head_dim]`.
        keys, values: `[1, num_kv_heads, num_keys, head_dim]`; they end with the queries' own tokens and may begin
            anywhere at or before the first token that a query sees, those of a lone query at that token.
        window: Visible tokens, the current one included; None for all.
    """
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    num_before = num_keys - num_queries
    outputs = []
    for begin, end in _blocks(num_queries, is_whole=window is None or num_keys <= window):
        first = 0 if window is None else max(0, num_before + begin + 1 - window)
        last = num_before + end
        outputs.append(
            _attend_block(
                queries[:, :, begin:end],
                keys[:, :, first:last],
                values[:, :, first:last],
                masks,
                window=window,
                scale=scale,
                sinks=sinks,
                logits_soft_cap=logits_soft_cap,
            )
        )
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _blocks(num_queries: int, *, is_whole: bool) -> Iterator[tuple[int, int]]:
    """Where blocks of queries begin and end.

    A query that is left over joins the block before it. By itself its keys would be a slice, and MLX on CUDA takes keys
    of one query that are a slice of 256 tokens or more for the first ones of their buffer (`unslice_kv` in the sources
    of mlx 0.32): it would read in front of the buffer.
    """
    begin = 0
    while begin < num_queries:
        end = begin + WINDOW_BLOCK_TOKENS
        if is_whole or num_queries <= end + 1:
            end = num_queries
        yield begin, end
        begin = end


def _attend_block(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    masks: BandMasks,
    *,
    window: int | None,
    scale: float,
    sinks: mx.array | None,
    logits_soft_cap: float,
) -> mx.array:
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    if logits_soft_cap:
        visible = masks.array(num_queries, num_keys, window)[None, None]
        output, _ = explicit_attention(queries, keys, values, visible, scale, sinks, logits_soft_cap)
        return output.astype(queries.dtype)
    sinks = None if sinks is None else sinks.astype(queries.dtype)
    mask = masks.for_mlx(num_queries, num_keys, window)
    output = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    return output

"""Attention of a prompt chunk in blocks against its definition in float64."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_paged.attention import chunk_attention
from mlxcel_paged.attention.chunk_attention import BandMasks, attend_chunk

Array = np.ndarray[Any, Any]


def expected(q: Array, k: Array, v: Array, window: int | None, scale: float, sinks: Array | None, cap: float) -> Array:
    num_heads, num_queries, _ = q.shape
    num_keys = k.shape[1]
    out = np.zeros(q.shape)
    for head in range(num_heads):
        kv_head = head // (num_heads // k.shape[0])
        for query in range(num_queries):
            position = num_keys - num_queries + query
            first = 0 if window is None else max(0, position - window + 1)
            logits = k[kv_head, first : position + 1] @ q[head, query] * scale
            if cap:
                logits = cap * np.tanh(logits / cap)
            top = max(logits.max(), -math.inf if sinks is None else sinks[head])
            weights = np.exp(logits - top)
            total = weights.sum() + (0 if sinks is None else math.exp(sinks[head] - top))
            out[head, query] = weights @ v[kv_head, first : position + 1] / total
    return out


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 8, 9, 29, 30, 31, 100])
@pytest.mark.parametrize(("num_before", "num_queries"), [(0, 1), (0, 30), (13, 17), (40, 8), (29, 1)])
def test_against_the_definition(
    monkeypatch: pytest.MonkeyPatch,
    num_before: int,
    num_queries: int,
    window: int | None,
    with_sinks: bool,
    cap: float,
) -> None:
    monkeypatch.setattr(chunk_attention, "WINDOW_BLOCK_TOKENS", 8)
    if window is not None:
        num_before = min(num_before, window - 1)
    random = np.random.default_rng(num_before + num_queries)
    q = 2 * random.standard_normal((4, num_queries, 16)).astype(np.float32)
    k, v = random.standard_normal((2, 2, num_before + num_queries, 16)).astype(np.float32)
    sinks = random.standard_normal(4).astype(np.float32) if with_sinks else None
    out = attend_chunk(
        *(mx.array(array)[None] for array in (q, k, v)),
        BandMasks(),
        window=window,
        scale=0.3,
        sinks=None if sinks is None else mx.array(sinks),
        logits_soft_cap=cap,
    )
    wanted = expected(*(array.astype(np.float64) for array in (q, k, v)), window, 0.3, sinks, cap)
    assert out.shape == (1, *q.shape)
    assert np.abs(np.array(out)[0] - wanted).max() <= 2e-5 * np.abs(wanted).max()


def test_layers_share_the_mask_and_blocks_of_one_shape_too() -> None:
    masks = BandMasks()
    assert masks.for_mlx(8, 20, None) == "causal"
    assert masks.for_mlx(8, 20, 20) == "causal"
    assert masks.for_mlx(8, 20, 13) is masks.array(8, 20, 13)
    assert np.array(masks.array(2, 4, 2)).tolist() == [[False, True, True, False], [False, False, True, True]]

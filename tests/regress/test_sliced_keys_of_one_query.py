"""MLX's attention on CUDA takes the sliced keys of one query for the beginning of a cache.

The fault class: a slice that does not begin where its buffer does goes to a function that undoes slices by dropping
their end. `mx.fast.scaled_dot_product_attention` does so for one query and 256 keys or more, so a window's last block
of one query read memory in front of the keys.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_paged.attention.chunk_attention import WINDOW_BLOCK_TOKENS, BandMasks, attend_chunk

WINDOW = 512


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
@pytest.mark.parametrize("num_left", [1, 2, WINDOW_BLOCK_TOKENS - 1])
def test_one_query_gets_keys_from_the_beginning_of_their_buffer(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, num_left: int
) -> None:
    num_queries = num_blocks * WINDOW_BLOCK_TOKENS + num_left
    num_keys = WINDOW - 1 + num_queries
    q = mx.random.normal((1, 2, num_queries, 8), key=mx.random.key(1))
    k, v = (mx.random.normal((1, 1, num_keys, 8), key=mx.random.key(seed)) for seed in (2, 3))
    seen = []
    attention = mx.fast.scaled_dot_product_attention

    def noted(queries: mx.array, keys: mx.array, *others: Any, **options: Any) -> mx.array:
        seen.append((queries.shape[2], address(keys) - address(k)))
        return attention(queries, keys, *others, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    out = attend_chunk(q, k, v, BandMasks(), window=WINDOW, scale=0.3, sinks=None, logits_soft_cap=0.0)
    assert sum(count for count, _ in seen) == num_queries
    assert [offset for count, offset in seen if count == 1] == ([0] if num_queries == 1 else [])
    last = attention(q[:, :, -1:], k[:, :, -WINDOW:], v[:, :, -WINDOW:], scale=0.3)
    np.testing.assert_allclose(np.array(out[:, :, -1:]), np.array(last), atol=1e-5)


def address(array: mx.array) -> int:
    mx.eval(array)
    return int(np.array(array, copy=False).ctypes.data)

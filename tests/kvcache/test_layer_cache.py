"""The layer cache answers mlx-lm's verbs and hands out handles."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_attention_mask

from mlxcel_paged.kvcache.handle import KeyHandle
from mlxcel_paged.kvcache.layer_cache import PagedLayerCache


class _Step:
    offset: int | mx.array = 5

    def attend(self, handle: KeyHandle, queries: mx.array, **options: Any) -> mx.array:
        return queries


def test_verbs() -> None:
    step = _Step()
    cache = PagedLayerCache(3, step)
    assert cache.offset == 5
    step.offset = mx.array([1, 2])
    assert cache.offset is step.offset
    assert (cache.nbytes, cache.size(), cache.empty(), cache.is_trimmable()) == (0, 0, False, False)
    for num_tokens, options in ((1, {}), (7, {"window_size": 4}), (7, {"return_array": True})):
        assert create_attention_mask(mx.zeros((1, num_tokens, 8)), cache, **options) is None


def test_an_update_returns_the_handles_that_shared_layers_get_again() -> None:
    cache = PagedLayerCache(3, _Step())
    with pytest.raises(RuntimeError, match="layer cache 3"):
        cache.keys_and_values()
    k, v = mx.zeros((1, 2, 1, 64)), mx.ones((1, 2, 1, 64))
    keys, values = cache.update_and_fetch(k, v)
    assert (keys.layer, keys.k_new, keys.v_new, keys.is_written) == (3, k, v, False)
    assert values is keys.values
    again = cache.keys_and_values()
    assert again[0] is keys
    assert again[1] is values

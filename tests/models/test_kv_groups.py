"""KV groups follow from the caches that a model asks for and the shapes of its attention."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from tiny import tiny_model

from mlxcel_paged.errors import UnsupportedModelError
from mlxcel_paged.models.kv_groups import kv_layout


def test_equal_layers_are_one_group() -> None:
    layout = kv_layout(tiny_model("llama"))
    (group,) = layout.groups
    assert (group.layer_ids, group.num_qo_heads, group.num_kv_heads, group.head_dim) == ((0, 1), 4, 2, 64)
    assert (group.window, group.uses_sinks, group.logits_soft_cap) == (None, False, 0.0)
    assert layout.group_of_layer == (0, 0)
    assert layout.dtype == mx.float32
    assert group.page_bytes(16, 4) == 2 * 2 * 2 * 64 * 16 * 4


def test_sliding_and_full_layers_are_two_groups() -> None:
    layout = kv_layout(tiny_model("gemma3_text"))
    assert [(group.layer_ids, group.window) for group in layout.groups] == [((0,), 24), ((1,), None)]
    assert layout.group_of_layer == (0, 1)


def test_sinks_and_soft_caps_are_seen() -> None:
    assert all(group.uses_sinks for group in kv_layout(tiny_model("gpt_oss")).groups)
    assert kv_layout(tiny_model("gemma2")).groups[0].logits_soft_cap == 5.0


def test_layers_that_share_kv_own_none() -> None:
    assert kv_layout(tiny_model("gemma4_text")).num_layers == 2


def test_the_dtype_is_that_of_the_keys() -> None:
    assert kv_layout(tiny_model("llama", dtype=mx.bfloat16)).dtype == mx.bfloat16


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (lambda: RotatingKVCache(max_size=64, keep=4), "keep=4"),
        (lambda: ArraysCache(2), "ArraysCache"),
        (lambda: ChunkedKVCache(64), "ChunkedKVCache"),
        (QuantizedKVCache, "QuantizedKVCache"),
    ],
)
def test_other_caches_are_unsupported_with_the_layer_and_the_reason(cache: Any, reason: str) -> None:
    model = tiny_model("llama")
    model.make_cache = lambda: [KVCache(), cache()]
    with pytest.raises(UnsupportedModelError, match=f"layer 1 .*{reason}"):
        kv_layout(model)


def test_a_rope_without_per_sequence_offsets_is_unsupported() -> None:
    model = tiny_model("llama")
    model.layers[0].self_attn.rope = DynamicNTKScalingRoPE(64, 512, False, 10000.0, 2.0)
    with pytest.raises(UnsupportedModelError, match="cannot run on paged KV"):
        kv_layout(model)

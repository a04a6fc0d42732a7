"""A window that a model has in its masks alone is ignored, and nothing shows before a sequence outgrows it.

The fault class: pages make masks themselves, from what a layer's own cache keeps, and the model's wish goes unheard.
The self-check's prompts are shorter than any real window.
"""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine.storage import storage_for_model
from mlxcel_paged.errors import UnsupportedModelError
from mlxcel_paged.models.kv_groups import kv_layout

WINDOW = 24


def sliding_model(cache: Any) -> llama.Model:
    """All layers attend to `WINDOW` tokens; `cache` makes what they keep them in."""
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            rms_norm_eps=1e-5,
            vocab_size=31,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=WINDOW,
        )
    )
    model.make_cache = lambda: [cache(), KVCache()]
    return model


def test_a_window_that_the_cache_keeps_is_paged() -> None:
    layout = kv_layout(sliding_model(lambda: RotatingKVCache(max_size=WINDOW)))
    assert [group.window for group in layout.groups] == [WINDOW, None]


@pytest.mark.parametrize(
    ("cache", "kept"), [(KVCache, "all tokens"), (lambda: RotatingKVCache(max_size=WINDOW - 1), "23 tokens")]
)
def test_another_one_is_refused_with_the_layer_and_both_windows(cache: Any, kept: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"layer 0 masks a window of 24 tokens .* keeps {kept}"):
        kv_layout(sliding_model(cache))


def test_such_a_model_is_served_on_dense_storage() -> None:
    choice = storage_for_model(EngineConfig(), sliding_model(KVCache), on_cpu=True)
    assert choice.storage == "dense"
    assert "window of 24 tokens" in choice.reason

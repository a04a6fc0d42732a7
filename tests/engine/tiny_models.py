"""Tiny random models as the loader would hand them over."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from mlxcel_paged.models.loader import LoadedModel

VOCAB_SIZE = 97
MAX_CONTEXT = 256
_CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_CONTEXT,
    "tie_word_embeddings": True,
}
_WINDOWS: dict[str, Any] = {"sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}


def load_tiny(family: str) -> LoadedModel:
    """Builds `llama` (one KV group) or `gemma3_text` (a full group and one with a window of 24).

    The weights are large enough that a wrong page, mask or position changes the most likely token.
    """
    module = importlib.import_module(f"mlx_lm.models.{family}")
    config = {"model_type": family, **_CONFIG, **(_WINDOWS if family == "gemma3_text" else {})}
    mx.set_default_device(mx.cpu)
    mx.random.seed(11)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(_random_like, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    tokenizer = SimpleNamespace(eos_token_ids={VOCAB_SIZE - 1})
    return LoadedModel(model, tokenizer, family, MAX_CONTEXT, config, mx.float32, "cpu")


def _random_like(value: mx.array) -> mx.array:
    if value.ndim == 1:
        return 1.0 + mx.random.normal(value.shape) * 0.1
    return mx.random.normal(value.shape) * (3.0 / value.shape[-1] ** 0.5)

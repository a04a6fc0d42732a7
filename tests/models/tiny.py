"""Tiny random models of many families, built in code. Head dimension 64, so that the fused kernel serves them."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxcel_paged.models.loader import LoadedModel

VOCAB = 97
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_SLIDING = ["sliding_attention", "full_attention"]
_MOE = {"num_experts": 4, "num_experts_per_tok": 2}

# Module of mlx_lm.models -> what differs from BASE.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"hidden_size": 256},
    "qwen3": {},
    "qwen3_moe": {
        **_MOE,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "phi3": {"hidden_size": 256, "partial_rotary_factor": 1.0},
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64},
    "gpt_oss": {
        "sliding_window": 24,
        "layer_types": _SLIDING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
    "mixtral": {"hidden_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {
        "hidden_size": 256,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 24, "layer_types": _SLIDING},
    "ministral3": {
        "sliding_window": 24,
        "layer_types": _SLIDING,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "llama_4_scaling_beta": 0.1,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "starcoder2": {"hidden_size": 256, "norm_epsilon": 1e-5},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5, "rope_traditional": True},
    "smollm3": {"no_rope_layer_interval": 2, "no_rope_layers": [1, 0]},
    "granite": {
        "hidden_size": 256,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.1,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "seed_oss": {"attention_bias": True},
    "exaone4": {"rope_scaling": None, "sliding_window": 24, "sliding_window_pattern": "LG"},
    "gemma3n": {
        "text_config": {
            "model_type": "gemma3n_text",
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "sliding_window": 24,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": _SLIDING * 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        }
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "global_head_dim": 64,
        "num_kv_shared_layers": 2,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "layer_types": _SLIDING * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
}
# The same module in another configuration.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_sliding": ("llama", {"layer_types": _SLIDING, "sliding_window": 24}),
}


def tiny_model(family: str, *, seed: int = 7, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """Builds `family` with random weights large enough that a wrong mask or position shows in the logits."""
    name, changes = VARIANTS.get(family) or (family, FAMILIES[family])
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = {"model_type": name, **BASE, **changes}
    if "text_config" in config:
        config["text_config"] = {**BASE, **config["text_config"]}
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda value: _random_like(value).astype(dtype), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def loaded_tiny(family: str, **options: Any) -> LoadedModel:
    """The tiny model of `family` as the loader would hand it over, without a tokenizer."""
    model = tiny_model(family, **options)
    dtype = options.get("dtype", mx.float32)
    return LoadedModel(model, None, family, BASE["max_position_embeddings"], dict(BASE), dtype, "cpu")


def _random_like(value: mx.array) -> mx.array:
    scale = 1.0 if value.ndim < 2 else 1.5 / value.shape[-1] ** 0.5
    return mx.random.normal(value.shape) * scale + (1.0 if value.ndim == 1 else 0.0)

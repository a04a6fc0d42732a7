"""Tiny random models of many families, built in code. Head dimension 64, so that the fused kernel serves them."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlxcel_paged.models.expert_rows import give_experts_row_strides
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
# What queries and keys of a module are multiplied by. Without it scores are large enough that rounding in 16 bits shows
# in logits almost as a wrong token does.
_ATTENTION_GAIN = {"gpt_oss": 0.6, "mixtral": 0.6}
# Feature 0 of a token's embedding in a model with experts, and how much routers heed it and the others.
_MARK = 1.0
_ROUTER_GAIN = 4.0
_ROUTER_NOISE = 0.05


def tiny_model(family: str, *, seed: int = 7, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """Builds `family` with random weights large enough that a wrong mask or position shows in the logits."""
    name, changes = VARIANTS.get(family) or (family, FAMILIES[family])
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = {"model_type": name, **BASE, **changes}
    if "text_config" in config:
        config["text_config"] = {**BASE, **config["text_config"]}
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(_random_like, model.parameters()))
    _soften_attention(model, _ATTENTION_GAIN.get(name, 1.0))
    _separate_experts(model)
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def router_of(layer: nn.Module) -> nn.Module | None:
    """What chooses a token's experts, if the layer has experts."""
    block = layer.get("mlp") or layer.get("block_sparse_moe")
    router: nn.Module | None = block.get("router") or block.get("gate") if block is not None else None
    return router


def loaded_tiny(family: str, **options: Any) -> LoadedModel:
    """The tiny model of `family` as the loader would hand it over for a GPU, without a tokenizer."""
    model = tiny_model(family, **options)
    give_experts_row_strides(model)
    dtype = options.get("dtype", mx.float32)
    return LoadedModel(model, None, family, BASE["max_position_embeddings"], dict(BASE), dtype, "cpu")


def _random_like(value: mx.array) -> mx.array:
    scale = 1.0 if value.ndim < 2 else 1.5 / value.shape[-1] ** 0.5
    return mx.random.normal(value.shape) * scale + (1.0 if value.ndim == 1 else 0.0)


def _soften_attention(model: nn.Module, gain: float) -> None:
    for layer in model.layers if gain != 1.0 else ():
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.update(tree_map(lambda value: value * gain, projection.parameters()))


def _separate_experts(model: nn.Module) -> None:
    """Gives every token its experts by its id: even ones the first half, odd ones the second.

    Between random experts some tokens come so close that rounding decides, and an expert exchanged is a jump of a third
    of the largest logit. So feature 0 of the residual stream carries the token's sign through all layers, and routers
    read it above all.
    """
    routers = [router_of(layer) for layer in model.layers]
    if None in routers:
        return
    embedding = model.model.embed_tokens
    embedding.weight[0::2, 0] = _MARK
    embedding.weight[1::2, 0] = -_MARK
    for layer, router in zip(model.layers, routers, strict=True):
        for name, value in tree_flatten(layer.parameters()):
            # What is added to the stream leaves feature 0 alone.
            if name.endswith(("o_proj.weight", "o_proj.bias")):
                value[0] = 0.0
            elif name.endswith("down_proj.weight"):
                value[:, 0, :] = 0.0
            elif name.endswith("down_proj.bias"):
                value[:, 0] = 0.0
        layer.post_attention_layernorm.weight[0] = 1.0
        half = router.weight.shape[0] // 2
        router.weight *= _ROUTER_NOISE
        router.weight[:half, 0] = _ROUTER_GAIN
        router.weight[half:, 0] = -_ROUTER_GAIN
        if "bias" in router:
            router.bias *= _ROUTER_NOISE

"""Turns a GGUF file of the llama family into an mlx-lm llama model, its configuration and its tokenizer.

GGUF stores the rows of the query and key projections permuted for interleaved rotary pairs; they are put back in the
order of the original checkpoint. Quantized tensors are dequantized, or kept where MLX has the same format exactly.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from mlx_lm.models import llama

from mlxcel_paged.errors import InvalidModelError, UnsupportedModelError
from mlxcel_paged.models.gguf_affine import GROUP_SIZE, affine_bits, to_affine
from mlxcel_paged.models.gguf_file import GGUFFile, GGUFTensor

_TOP = {"token_embd.weight": "model.embed_tokens", "output_norm.weight": "model.norm", "output.weight": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def llama_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the configuration of `file` under the names of a Hugging Face llama checkpoint.

    Raises:
        UnsupportedModelError: Another architecture, or a variant of llama that mlx-lm's llama cannot express.
        InvalidModelError: A key is missing.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(f"{file.path}: GGUF architecture {architecture!r} is not supported; llama is")

    def key(name: str, default: Any = None) -> Any:
        value = file.metadata.get(f"llama.{name}", default)
        if value is None:
            raise InvalidModelError(f"{file.path}: metadata key llama.{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UnsupportedModelError(f"{file.path}: metadata key llama.{name} must be a positive number: {value!r}")
        return value

    heads, hidden = key("attention.head_count"), key("embedding_length")
    head_dim = key("attention.key_length", hidden // heads)
    if key("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path}: rotary embedding on a part of the head is not supported")
    if "token_embd.weight" not in file.tensors:
        raise InvalidModelError(f"{file.path}: tensor token_embd.weight is missing")
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": key("block_count"),
        "intermediate_size": key("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": key("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": key("context_length"),
        "rope_theta": key("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, head_dim, key("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def llama_model(file: GGUFFile, config: dict[str, Any], *, dtype: mx.Dtype, keep_quantized: bool) -> nn.Module:
    """Builds mlx-lm's llama with the weights of `file` in `dtype`.

    Raises:
        UnsupportedModelError: The file holds a tensor that the model has no place for.
        InvalidModelError: A tensor is missing or has another shape than the configuration says.
    """
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights: dict[str, mx.array] = {}
    bits_of: dict[str, int] = {}
    for tensor in file.tensors.values():
        if tensor.name == _ROPE_FREQS:
            continue
        path = _module_path(tensor, file)
        rows = _checkpoint_rows(tensor, config)
        bits = affine_bits(tensor) if keep_quantized else None
        if bits is None:
            weights[f"{path}.weight"] = _dense(tensor, rows).astype(dtype)
        else:
            bits_of[path] = bits
            weight, scales, biases = to_affine(tensor, rows, dtype)
            weights |= {f"{path}.weight": weight, f"{path}.scales": scales, f"{path}.biases": biases}
    if bits_of:
        nn.quantize(
            model,
            group_size=GROUP_SIZE,
            class_predicate=lambda path, _: (
                {"group_size": GROUP_SIZE, "bits": bits_of[path]} if path in bits_of else False
            ),
        )
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise InvalidModelError(f"{file.path}: the tensors do not fit the configuration: {error}") from error
    model.eval()
    return model


def _module_path(tensor: GGUFTensor, file: GGUFFile) -> str:
    path = _TOP.get(tensor.name)
    parts = tensor.name.split(".")
    if path is None and len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in _LAYER:
        path = f"model.layers.{parts[1]}.{_LAYER[parts[2]]}"
    if path is None:
        raise UnsupportedModelError(
            f"{file.path}: this variant of llama is not supported, it has a tensor {tensor.name}"
        )
    return path


def _checkpoint_rows(tensor: GGUFTensor, config: dict[str, Any]) -> np.ndarray[Any, Any]:
    if tensor.name.endswith("attn_q.weight"):
        return _unpermute(tensor.data, config["num_attention_heads"])
    if tensor.name.endswith("attn_k.weight"):
        return _unpermute(tensor.data, config["num_key_value_heads"])
    return tensor.data


def _unpermute(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Undoes the interleaving of a head's two rotary halves; whole rows move, so quantized bytes can stay packed."""
    num_rows, row_bytes = rows.shape
    if num_rows % (2 * num_heads):
        raise InvalidModelError(f"a query or key projection of {num_rows} rows does not divide into {num_heads} heads")
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, row_bytes)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(num_rows, row_bytes)


def _dense(tensor: GGUFTensor, rows: np.ndarray[Any, Any]) -> mx.array:
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}.get(tensor.kind)
    if plain is not None:
        return mx.array(rows.view(plain))
    try:
        return mx.array(dequantize(rows, tensor.kind))
    except NotImplementedError as error:
        raise UnsupportedModelError(f"tensor {tensor.name}: type {tensor.kind.name} cannot be dequantized") from error


def _rope_scaling(file: GGUFFile, head_dim: int, base: float) -> dict[str, Any] | None:
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return {"type": "linear", "factor": file.metadata.get("llama.rope.scaling.factor", 1.0)}
    if kind != "none":
        raise UnsupportedModelError(f"{file.path}: rotary scaling {kind!r} is not supported")
    if _ROPE_FREQS not in file.tensors:
        return None
    factors = file.tensors[_ROPE_FREQS].data.view(np.float32)
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3_ROPE}
    if not np.allclose(factors, _llama3_factors(scaling, head_dim, base), rtol=1e-3):
        raise UnsupportedModelError(f"{file.path}: {_ROPE_FREQS} does not hold Llama 3's frequency factors")
    return scaling


def _llama3_factors(scaling: dict[str, Any], head_dim: int, base: float) -> np.ndarray[Any, Any]:
    wavelength = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    factors: np.ndarray[Any, Any] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return factors

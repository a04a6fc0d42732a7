"""Loads a model and its tokenizer from whatever names one: `embedded`, a directory, a GGUF file or a repository id.

Model definitions and tokenizers are mlx-lm's. A spec is never reinterpreted: what looks like a path must exist.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxcel_paged.errors import BackendUnavailableError, InvalidFieldError, InvalidModelError, ModelNotFoundError
from mlxcel_paged.models.embedded import embedded_gguf
from mlxcel_paged.models.expert_rows import give_experts_row_strides
from mlxcel_paged.models.flat_quantized import flatten_quantized

EMBEDDED = "embedded"
_REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_MAX_CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "model_max_length", "n_positions", "n_ctx")
_DEFAULT_MAX_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: mlx-lm's module; weights are evaluated and in `dtype` (quantized ones excepted).
        tokenizer: mlx-lm's wrapper (`eos_token_ids`, `detokenizer`, `apply_chat_template`, ...).
        name: What clients call it.
        max_context: Tokens that the model was trained to see.
        config: The configuration under the checkpoint's names.
        dtype: Dtype of activations and therefore of keys and values.
        device: Where MLX runs it.
    """

    model: nn.Module
    tokenizer: TokenizerWrapper
    name: str
    max_context: int
    config: dict[str, Any]
    dtype: mx.Dtype
    device: Literal["cpu", "gpu"]

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding: what a token id may be without reading out of bounds."""
        for source in (self.config, self.config.get("text_config") or {}):
            if isinstance(source.get("vocab_size"), int):
                return int(source["vocab_size"])
        return len(self.tokenizer)


def load_model(
    spec: str,
    *,
    device: Literal["cpu", "gpu"],
    dtype: str | mx.Dtype | None = None,
    keep_quantized: bool | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Loads the model that `spec` names and makes `device` MLX's default device.

    Args:
        spec: `embedded`; a directory in mlx-lm's or Hugging Face's layout; a `.gguf` file of the llama family; or a
            Hugging Face repository id (`owner/name`), which needs a reachable hub or a local copy in its cache.
        device: `cpu` or `gpu`.
        dtype: Dtype of weights and activations. None: float32 on the CPU, else the checkpoint's own.
        keep_quantized: Keep quantized weights as they are. None: on a GPU, but not on the CPU, where MLX's quantized
            products are 10-60x slower.
        trust_remote_code: Allow a checkpoint to run Python code of its own.

    Raises:
        ModelNotFoundError: Nothing is there under that name; the message says what to do.
        InvalidModelError: The files are damaged or inconsistent.
        UnsupportedModelError: The model is of a kind that cannot be loaded.
        BackendUnavailableError: MLX as installed cannot use the device.
    """
    _use_device(device)
    chosen = _chosen_dtype(dtype)
    if chosen is None and device == "cpu":
        chosen = mx.float32
    keep = device == "gpu" if keep_quantized is None else keep_quantized
    path = _local_path(spec)
    if path is not None and path.is_file():
        loaded = _load_gguf(path, "SmolLM2-135M-Instruct" if spec == EMBEDDED else path.stem, device, chosen, keep)
    else:
        loaded = _load_checkpoint(spec if path is None else str(path), device, chosen, keep, trust_remote_code)
    if device == "gpu" and mx.cuda.is_available():
        flatten_quantized(loaded.model)
        give_experts_row_strides(loaded.model)
    return loaded


def _use_device(device: Literal["cpu", "gpu"]) -> None:
    try:
        mx.set_default_device(mx.cpu if device == "cpu" else mx.gpu)
    except ValueError as error:
        hint = "--device cpu, or another build of MLX" if device == "gpu" else "--device gpu"
        raise BackendUnavailableError(f"MLX as installed has no {device} backend: {error} (hint: {hint})") from error


def _chosen_dtype(dtype: str | mx.Dtype | None) -> mx.Dtype | None:
    if dtype is None or isinstance(dtype, mx.Dtype):
        return dtype
    if dtype not in _DTYPES:
        raise InvalidFieldError("dtype", dtype, f"one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _local_path(spec: str) -> Path | None:
    """The file or directory that `spec` names; None for a repository id."""
    if spec == EMBEDDED:
        return embedded_gguf()
    path = Path(spec).expanduser()
    try:
        is_dir, is_file = bool(spec) and path.is_dir(), path.is_file()
    except OSError as error:  # a name too long, a folder that may not be looked into
        raise ModelNotFoundError(f"no model at {spec!r}: {error.strerror}") from error
    if is_dir:
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"the directory {path} holds no model: config.json is missing")
        return path
    if is_file:
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is a file but not a .gguf file (hint: name the model's directory)")
        return path
    if (
        path.suffix == ".gguf"
        or path.is_absolute()
        or spec.startswith((".", "~"))
        or not _REPOSITORY_ID.fullmatch(spec)
    ):
        raise ModelNotFoundError(
            f"no model at {spec!r} (hint: `{EMBEDDED}`, a directory with config.json, a .gguf file, or a repository id"
            " such as mlx-community/SmolLM2-135M-Instruct)"
        )
    return None


def _load_gguf(
    path: Path, name: str, device: Literal["cpu", "gpu"], dtype: mx.Dtype | None, keep_quantized: bool
) -> LoadedModel:
    from mlxcel_paged.models.gguf import llama_config, llama_model
    from mlxcel_paged.models.gguf_file import read_gguf
    from mlxcel_paged.models.gguf_tokenizer import tokenizer_from_gguf

    file = read_gguf(path)
    config = llama_config(file)
    dtype = dtype or mx.float16
    model = llama_model(file, config, dtype=dtype, keep_quantized=keep_quantized)
    mx.eval(model.parameters())
    max_context = config["max_position_embeddings"]
    tokenizer = tokenizer_from_gguf(file.metadata, max_context)
    return LoadedModel(model, tokenizer, name, max_context, config, dtype, device)


def _load_checkpoint(
    spec: str, device: Literal["cpu", "gpu"], dtype: mx.Dtype | None, keep_quantized: bool, trust_remote_code: bool
) -> LoadedModel:
    from mlx_lm.utils import load

    try:
        model, tokenizer, config = load(spec, lazy=True, return_config=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _load_error(spec, error) from error
    model = _in_dtype(model, dtype, keep_quantized)
    mx.eval(model.parameters())
    name = Path(spec).name if os.path.isdir(spec) else spec
    return LoadedModel(model, tokenizer, name, _max_context(config), config, _activation_dtype(model), device)


def _load_error(spec: str, error: Exception) -> Exception:
    if os.path.isdir(spec):
        return InvalidModelError(f"the model in {spec} cannot be loaded: {type(error).__name__}: {error}")
    return ModelNotFoundError(
        f"{spec} is no local path, and the Hugging Face hub did not provide it: {type(error).__name__}: {error}"
        f" (hint: check the name and the network, download it elsewhere and pass its directory, or use `{EMBEDDED}`)"
    )


def _in_dtype(model: nn.Module, dtype: mx.Dtype | None, keep_quantized: bool) -> nn.Module:
    if not keep_quantized:
        from mlx_lm.utils import dequantize_model

        model = dequantize_model(model)
    if dtype is not None:
        model.set_dtype(dtype)
    model.eval()
    return model


def _activation_dtype(model: nn.Module) -> mx.Dtype:
    """Norm weights are never quantized, so the first one tells in which dtype activations flow."""
    floating: list[tuple[str, mx.Dtype]] = [
        (name, value.dtype) for name, value in tree_flatten(model.parameters()) if value.dtype in _DTYPES.values()
    ]
    for name, dtype in floating:
        if "norm" in name:
            return dtype
    return floating[0][1] if floating else mx.float32


def _max_context(config: dict[str, Any]) -> int:
    for source in (config, config.get("text_config") or {}):
        for key in _MAX_CONTEXT_KEYS:
            if isinstance(source.get(key), int):
                return int(source[key])
    return _DEFAULT_MAX_CONTEXT

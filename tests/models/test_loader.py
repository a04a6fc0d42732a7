"""`load_model` takes what names a model, and says what is wrong with what does not."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from test_gguf import VOCAB, write_gguf
from tiny import BASE, tiny_model

from mlxcel_paged.errors import BackendUnavailableError, InvalidModelError, ModelNotFoundError, UnsupportedModelError
from mlxcel_paged.models.gguf_file import read_gguf
from mlxcel_paged.models.gguf_tokenizer import tokenizer_from_gguf
from mlxcel_paged.models.loader import load_model

TOKENS = mx.array([[5, 17, 80, 3]])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory in Hugging Face's layout that holds the tiny llama in bfloat16."""
    directory = tmp_path / "tiny-llama"
    save_checkpoint(directory, tiny_model("llama", dtype=mx.bfloat16), {})
    return directory


def save_checkpoint(directory: Path, model: nn.Module, extra: dict[str, object]) -> None:
    directory.mkdir()
    config = {"model_type": "llama", **BASE, **extra}
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))
    write_gguf(directory / "vocabulary.gguf")
    tokenizer = tokenizer_from_gguf(read_gguf(directory / "vocabulary.gguf").metadata, 128)
    tokenizer.save_pretrained(directory)
    (directory / "vocabulary.gguf").unlink()


def test_a_directory(checkpoint: Path) -> None:
    loaded = load_model(str(checkpoint), device="cpu")
    assert (loaded.name, loaded.max_context, loaded.dtype) == ("tiny-llama", 512, mx.float32)
    assert {value.dtype for _, value in tree_flatten(loaded.model.parameters())} == {mx.float32}
    assert loaded.tokenizer.encode("hello") == [VOCAB.index("hello")]
    expected = tiny_model("llama", dtype=mx.bfloat16)
    expected.set_dtype(mx.float32)
    assert mx.array_equal(loaded.model(TOKENS), expected(TOKENS))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_dtype(checkpoint: Path, dtype: str) -> None:
    loaded = load_model(str(checkpoint), device="cpu", dtype=dtype)
    assert loaded.dtype == getattr(mx, dtype)
    assert loaded.model(TOKENS).dtype == getattr(mx, dtype)


def test_quantized_weights_are_dequantized_on_the_cpu_unless_kept(tmp_path: Path) -> None:
    model = tiny_model("llama")
    nn.quantize(model, group_size=32, bits=4)
    save_checkpoint(tmp_path / "tiny", model, {"quantization": {"group_size": 32, "bits": 4}})
    plain = load_model(str(tmp_path / "tiny"), device="cpu")
    kept = load_model(str(tmp_path / "tiny"), device="cpu", keep_quantized=True)
    assert not any(isinstance(module, nn.QuantizedLinear) for module in plain.model.modules())
    assert any(isinstance(module, nn.QuantizedLinear) for module in kept.model.modules())
    logits, expected = plain.model(TOKENS), kept.model(TOKENS)
    assert float(mx.abs(logits - expected).max()) <= 1e-4 * float(mx.abs(expected).max())


def test_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(str(tmp_path / "tiny.gguf"), device="cpu")
    assert (loaded.name, loaded.max_context, loaded.dtype) == ("tiny", 128, mx.float32)
    assert loaded.tokenizer.encode("hello") == [VOCAB.index("hello")]


@pytest.mark.parametrize(
    "spec", ["./nothing", "/no/such/model", "missing.gguf", "dir/missing.gguf", "gpt2", "a/b/c", "~/none", ""]
)
def test_what_is_not_there_is_not_taken_for_something_else(spec: str) -> None:
    with pytest.raises(ModelNotFoundError, match="embedded"):
        load_model(spec, device="cpu")


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"123")
    with pytest.raises(ModelNotFoundError, match=r"\.gguf"):
        load_model(str(tmp_path / "model.bin"), device="cpu")


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        load_model(str(tmp_path), device="cpu")


def test_a_directory_without_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(InvalidModelError, match="safetensors"):
        load_model(str(checkpoint), device="cpu")


def test_a_model_type_that_mlx_lm_does_not_know(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": "perceptron"}))
    with pytest.raises(InvalidModelError, match="perceptron"):
        load_model(str(checkpoint), device="cpu")


def test_a_repository_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"nobody/no-such-model.*hub.*hint.*embedded"):
        load_model("nobody/no-such-model", device="cpu")


def test_a_device_that_mlx_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: mx.Device) -> None:
        raise ValueError("no such backend")

    monkeypatch.setattr(mx, "set_default_device", refuse)
    with pytest.raises(BackendUnavailableError, match=r"gpu.*hint: --device cpu"):
        load_model("embedded", device="gpu")


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="float64"):
        load_model("embedded", device="cpu", dtype="float64")


def test_errors_are_of_the_builtin_kinds_too() -> None:
    assert issubclass(ModelNotFoundError, ValueError)
    assert issubclass(UnsupportedModelError, ValueError)

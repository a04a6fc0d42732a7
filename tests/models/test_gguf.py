"""GGUF files of the llama family become mlx-lm models and tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from mlx_lm.models import llama

from mlxcel_paged.errors import InvalidModelError, UnsupportedModelError
from mlxcel_paged.models.gguf import llama_config, llama_model
from mlxcel_paged.models.gguf_file import read_gguf
from mlxcel_paged.models.gguf_tokenizer import tokenizer_from_gguf

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 2, 4, 2, 32, 96
BYTES = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
LETTERS = [*BYTES, *(chr(256 + extra) for extra in range(256 - len(BYTES)))]  # GPT-2's byte alphabet
VOCAB = [*LETTERS, "he", "ll", "hell", "hello", "Ġ", "<|begin|>", "<|im_end|>", "<tool>"]


def checkpoint(seed: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    """Weights under the names of the original checkpoint."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        return (random.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(len(VOCAB), HIDDEN)}
    weights["model.norm.weight"] = random.standard_normal(HIDDEN).astype(np.float32)
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{base}.{name}.weight"] = random.standard_normal(HIDDEN).astype(np.float32)
        weights[f"{base}.self_attn.q_proj.weight"] = matrix(HEADS * HEAD_DIM, HIDDEN)
        weights[f"{base}.self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[f"{base}.self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        weights[f"{base}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        weights[f"{base}.mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{base}.mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{base}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
    return weights


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(matrix: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Moves row `i` of a head's first half to `2i` and of its second half to `2i + 1`, as GGUF stores them."""
    moved = np.empty_like(matrix)
    head_dim = matrix.shape[0] // num_heads
    for head in range(num_heads):
        for row in range(head_dim // 2):
            moved[head * head_dim + 2 * row] = matrix[head * head_dim + row]
            moved[head * head_dim + 2 * row + 1] = matrix[head * head_dim + head_dim // 2 + row]
    return moved


def write_gguf(
    path: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32, *, architecture: str = "llama", **extra: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """Writes a tiny llama with `gguf`'s own writer and returns its weights under the checkpoint's names."""
    weights = checkpoint()
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(extra.pop("pre", "smollm"))
    writer.add_token_list(VOCAB)
    writer.add_token_types([1] * (len(VOCAB) - 3) + [3, 3, 4])
    writer.add_token_merges(["h e", "l l", "he ll", "hell o"])
    writer.add_bos_token_id(VOCAB.index("<|begin|>"))
    writer.add_eos_token_id(VOCAB.index("<|im_end|>"))
    writer.add_chat_template("{% for m in messages %}<|begin|>{{ m['content'] }}<|im_end|>{% endfor %}")
    for name, original in weights.items():
        weight = original
        parts = name.removesuffix(".weight").split(".")
        if name.startswith("model.layers"):
            gguf_name = f"blk.{parts[2]}.{GGUF_NAMES['.'.join(parts[3:])]}.weight"
        else:
            gguf_name = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[parts[1]]
        if "attn_q" in gguf_name or "attn_k" in gguf_name:
            weight = interleave(weight, HEADS if "attn_q" in gguf_name else KV_HEADS)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name, weight)
        else:
            writer.add_tensor(gguf_name, quantize(weight, kind), raw_dtype=kind)
    for name, value in extra.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def stock_logits(weights: dict[str, np.ndarray[Any, Any]], tokens: list[int]) -> mx.array:
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            intermediate_size=INNER,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            rms_norm_eps=1e-5,
            vocab_size=len(VOCAB),
            rope_theta=10000.0,
            tie_word_embeddings=True,
        )
    )
    model.load_weights([(name, mx.array(weight)) for name, weight in weights.items()])
    return model(mx.array([tokens]))


TOKENS = [5, 17, 200, 3, 44, 261, 9]


def test_a_float32_file_gives_the_logits_of_its_checkpoint(tmp_path: Path) -> None:
    """Query and key rows come back in the checkpoint's order, and nothing else moves."""
    weights = write_gguf(tmp_path / "tiny.gguf")
    file = read_gguf(tmp_path / "tiny.gguf")
    model = llama_model(file, llama_config(file), dtype=mx.float32, keep_quantized=False)
    assert mx.array_equal(model(mx.array([TOKENS])), stock_logits(weights, TOKENS))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_kept_quantized_weights_are_the_dequantized_ones_exactly(tmp_path: Path, kind: str) -> None:
    """MLX's affine form of a block holds the same 32 numbers, so both models agree beyond rounding of the product."""
    write_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType[kind])
    file = read_gguf(tmp_path / "tiny.gguf")
    config = llama_config(file)
    kept = llama_model(file, config, dtype=mx.float32, keep_quantized=True)
    plain = llama_model(file, config, dtype=mx.float32, keep_quantized=False)
    for layer in range(LAYERS):
        projection = kept.layers[layer].self_attn.q_proj
        weight = mx.dequantize(projection.weight, projection.scales, projection.biases, 32, projection.bits)
        assert mx.allclose(weight, plain.layers[layer].self_attn.q_proj.weight, rtol=1e-6, atol=1e-7)
    logits, expected = kept(mx.array([TOKENS])), plain(mx.array([TOKENS]))
    assert float(mx.abs(logits - expected).max()) <= 1e-4 * float(mx.abs(expected).max())


def test_another_architecture_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", architecture="gptneox")
    with pytest.raises(UnsupportedModelError, match="gptneox"):
        llama_config(read_gguf(tmp_path / "tiny.gguf"))


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    """A bias that the model would drop changes the output, so it must not be dropped."""
    write_gguf(tmp_path / "tiny.gguf", **{"blk.0.attn_q.bias": np.zeros(HEADS * HEAD_DIM, np.float32)})
    file = read_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_q\.bias"):
        llama_model(file, llama_config(file), dtype=mx.float32, keep_quantized=False)


def test_llama3_frequency_factors_become_its_rope_scaling(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 8192}
    wavelength = 2 * np.pi * 10000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = []
    for length in wavelength:
        if length < scaling["original"] / scaling["high_freq_factor"]:
            factors.append(1.0)
        elif length > scaling["original"] / scaling["low_freq_factor"]:
            factors.append(scaling["factor"])
        else:
            smooth = (scaling["original"] / length - 1.0) / 3.0
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    write_gguf(tmp_path / "tiny.gguf", **{"rope_freqs.weight": np.array(factors, np.float32)})
    rope = llama_config(read_gguf(tmp_path / "tiny.gguf"))["rope_scaling"]
    assert rope == {
        "rope_type": "llama3",
        "factor": pytest.approx(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    write_gguf(tmp_path / "odd.gguf", **{"rope_freqs.weight": np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)})
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        llama_config(read_gguf(tmp_path / "odd.gguf"))


@pytest.mark.parametrize("keep", [0, 3, 4, 11, 23, 200, 4000, -100])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, keep: int) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:keep])
    with pytest.raises(InvalidModelError, match=r"cut\.gguf"):
        read_gguf(tmp_path / "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(InvalidModelError, match="not a GGUF file"):
        read_gguf(tmp_path / "cut.gguf")


def test_the_tokenizer_comes_back_whole(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    tokenizer = tokenizer_from_gguf(read_gguf(tmp_path / "tiny.gguf").metadata, 128)
    assert tokenizer.encode("hello") == [VOCAB.index("hello")]
    assert tokenizer.encode("<|begin|>hello<tool>") == [VOCAB.index(text) for text in ("<|begin|>", "hello", "<tool>")]
    assert tokenizer.eos_token_ids == {VOCAB.index("<|im_end|>")}
    assert tokenizer.bos_token == "<|begin|>"
    assert tokenizer.decode(tokenizer.encode("héllo 12 日本 😀")) == "héllo 12 日本 😀"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == tokenizer.encode(
        "<|begin|>hello<|im_end|>"
    )


def test_an_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", pre="klingon")
    with pytest.raises(UnsupportedModelError, match="klingon"):
        tokenizer_from_gguf(read_gguf(tmp_path / "tiny.gguf").metadata, 128)


def test_token_ids_and_merges_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    metadata = read_gguf(tmp_path / "tiny.gguf").metadata
    with pytest.raises(InvalidModelError, match="eos_token_id"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.eos_token_id": len(VOCAB)}, 128)
    with pytest.raises(InvalidModelError, match="merges"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.merges": ["h e", "no such"]}, 128)


@pytest.mark.parametrize("value", [0, -1, [4, 4], "four", True])
def test_geometry_that_is_no_positive_number_is_named(tmp_path: Path, value: Any) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    file = read_gguf(tmp_path / "tiny.gguf")
    file.metadata["llama.attention.head_count_kv"] = value
    with pytest.raises(UnsupportedModelError, match="head_count_kv"):
        llama_config(file)


def test_sentence_piece_joins_by_score() -> None:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "ab",
        "bc",
        "abc",
        "▁ab",
    ]
    types = [2, 3, 3, *([6] * 256), *([1] * 8)]
    scores = [0.0] * 259 + [-8.0, -9.0, -9.5, -9.9, -1.0, -2.0, -3.0, -0.5]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = tokenizer_from_gguf(metadata, 128)
    assert tokenizer.encode("abc ab") == [1, pieces.index("▁ab"), pieces.index("c"), pieces.index("▁ab")]
    assert tokenizer.encode("é", add_special_tokens=False) == [pieces.index("▁"), 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("abc é ab", add_special_tokens=False)) == "abc é ab"
    assert tokenizer.eos_token_ids == {2}

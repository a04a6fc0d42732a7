"""Layers of a model on doubles of the kernels for products: who is turned, who shares a launch, what falls back."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny
from cuda_double import KernelsDouble
from products_double import Launches, install_doubles

from mlxcel_paged.models.flat_quantized import FlatQuantizedLinear, flatten_quantized
from mlxcel_paged.models.paged_model import PagedModel
from mlxcel_paged.models.paged_rows import PagedRows
from mlxcel_paged.models.siblings import Siblings
from mlxcel_paged.models.streamed_dense import StreamedEmbedding, StreamedLinear
from mlxcel_paged.models.streamed_products import stream_products
from mlxcel_paged.models.streamed_quantized import StreamedQuantizedEmbedding, StreamedQuantizedLinear

WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 96}
QKV, OUT, GATE_UP, DOWN, LOGITS = [256, 128, 128], [256], [512, 512], [256], [96]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return install_doubles(monkeypatch)


def model_of(monkeypatch: pytest.MonkeyPatch, family: str, **changes: Any) -> nn.Module:
    monkeypatch.setitem(tiny.FAMILIES, family, {**tiny.FAMILIES[family], **changes})
    return tiny.tiny_model(family, dtype=mx.float16)


def logits(model: nn.Module, num_rows: int, num_tokens: int = 1) -> mx.array:
    result: mx.array = model(mx.arange(num_rows * num_tokens, dtype=mx.int32).reshape(num_rows, num_tokens) % 90)
    mx.eval(result)
    return result


def close(found: mx.array, wanted: mx.array) -> bool:
    return float(mx.abs(found - wanted).max()) <= 2e-2 * float(mx.abs(wanted).max())


def siblings_of(model: nn.Module) -> list[Siblings]:
    found = (getattr(module, "siblings", None) for module in model.modules())
    return list({id(siblings): siblings for siblings in found if siblings is not None}.values())


def test_a_decode_pass_launches_once_for_each_input(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    model = model_of(monkeypatch, "llama", **WIDE)
    shapes = ((2, 1), (16, 1), (1, 1), (17, 1), (1, 5), (2, 7))
    wanted = [logits(model, *shape) for shape in shapes]
    assert stream_products(model, mx.float16, 2) == 2 * 7 + 1
    assert isinstance(model.model.embed_tokens, StreamedEmbedding)
    assert isinstance(model.layers[0].self_attn.q_proj, StreamedLinear)
    for shape, expected in zip(shapes, wanted, strict=True):
        launches.clear()
        assert close(logits(model, *shape), expected)
        is_served = shape[1] == 1 and 2 <= shape[0] <= 16
        assert launches.dense == ([QKV, OUT, GATE_UP, DOWN] * 2 + [LOGITS] if is_served else [])
        assert [siblings.num_waiting for siblings in siblings_of(model)] == [0] * 4


@pytest.mark.parametrize("bits", [None, 4])
def test_a_paged_model_decodes_through_the_kernels(
    monkeypatch: pytest.MonkeyPatch, launches: Launches, bits: int | None
) -> None:
    """Together with RoPE that attention applies; prompts stay with MLX, and so do rows that are too many."""
    monkeypatch.setitem(tiny.FAMILIES, "llama", {**tiny.FAMILIES["llama"], **WIDE})
    loaded = tiny.loaded_tiny("llama", dtype=mx.float16)
    if bits is not None:
        nn.quantize(loaded.model, group_size=64, bits=bits)
    options: dict[str, Any] = {"num_pages": 80, "page_size": 16, "max_slots": 24, "max_context": 64}
    kernels = KernelsDouble()
    monkeypatch.setenv("MLXCEL_PAGED_STEP_FUSION", "0")
    plain = PagedModel(replace(loaded, device="gpu"), kernels=kernels, **options)
    kernels.page_double.register(plain.pools)
    wanted = [decoded(plain, launches, num_rows) for num_rows in (3, 20)]
    assert not launches.dense
    assert not launches.quantized
    monkeypatch.setenv("MLXCEL_PAGED_STEP_FUSION", "1")
    fused = PagedModel(replace(loaded, device="gpu"), kernels=kernels, **options)
    kernels.page_double.register(fused.pools)
    step = [QKV, OUT, GATE_UP, DOWN] * 2 + [LOGITS]
    seen = launches.dense if bits is None else launches.quantized
    for num_rows, expected, launched in zip((3, 20), wanted, (step, []), strict=True):
        assert close(decoded(fused, launches, num_rows), expected)
        assert seen == launched


def decoded(paged: PagedModel, launches: Launches, num_rows: int) -> mx.array:
    """Logits of one step of sequences of their own; only the step's launches are left."""
    rows = PagedRows(paged)
    for row in range(num_rows):
        rows.add([row, row + 1, row + 2, 5], chunk=16)
    launches.clear()
    result = rows.decode([7] * num_rows + [0] * (paged.launch_rows(num_rows) - num_rows))
    mx.eval(result)
    rows.close()
    return result[:num_rows]


def test_turning_a_model_again_changes_nothing(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    model = model_of(monkeypatch, "llama", **WIDE)
    stream_products(model, mx.float16, 2)
    before = siblings_of(model)
    assert stream_products(model, mx.float16, 2) == 0
    assert siblings_of(model) == before


def test_a_weight_that_is_a_transposed_view_is_stored_row_by_row(
    monkeypatch: pytest.MonkeyPatch, launches: Launches
) -> None:
    """As those of GPT-2 are once they are loaded; others stay where they are."""
    model = model_of(monkeypatch, "llama", **WIDE)
    wanted = logits(model, 2)
    view, plain = model.layers[0].mlp.up_proj, model.layers[0].mlp.gate_proj
    view.weight = mx.contiguous(view.weight.T).T
    mx.eval(view.weight)
    assert not memoryview(view.weight).c_contiguous
    address = np.array(plain.weight, copy=False).ctypes.data
    stream_products(model, mx.float16, 2)
    assert memoryview(view.weight).c_contiguous
    assert np.array(plain.weight, copy=False).ctypes.data == address
    assert close(logits(model, 2), wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model(monkeypatch: pytest.MonkeyPatch, launches: Launches, bits: int) -> None:
    model = model_of(monkeypatch, "llama", **WIDE)
    nn.quantize(model, group_size=64, bits=bits)
    flatten_quantized(model)
    wanted = {shape: logits(model, *shape) for shape in ((1, 1), (2, 1), (3, 4))}
    assert stream_products(model, mx.float16, 2) == 2 * 7 + 1
    assert isinstance(model.model.embed_tokens, StreamedQuantizedEmbedding)
    assert isinstance(model.layers[0].mlp.gate_proj, StreamedQuantizedLinear)
    for shape, expected in wanted.items():
        launches.clear()
        assert close(logits(model, *shape), expected)
        assert launches.quantized == ([QKV, OUT, GATE_UP, DOWN] * 2 + [LOGITS] if shape[1] == 1 else [])
        assert not launches.dense


def test_quantizations_that_no_kernel_serves_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, launches: Launches
) -> None:
    for bits, dtype, mode in ((3, mx.float16, "affine"), (8, mx.bfloat16, "affine"), (4, mx.float16, "mxfp4")):
        model = model_of(monkeypatch, "llama", **WIDE)
        model.set_dtype(dtype)
        nn.quantize(model, group_size=32 if mode == "mxfp4" else 64, bits=bits, mode=mode)
        flatten_quantized(model)
        assert stream_products(model, dtype, 2) == 0
        assert type(model.layers[0].mlp.gate_proj) is FlatQuantizedLinear


def test_mixed_quantization_joins_what_is_alike(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    model = model_of(monkeypatch, "llama", **WIDE)

    def choice(path: str, module: nn.Module) -> bool | dict[str, int]:
        if not hasattr(module, "to_quantized") or "layers.1" in path:
            return False
        return {"group_size": 64, "bits": 8 if "v_proj" in path else 4}

    nn.quantize(model, class_predicate=choice)
    wanted = logits(model, 3)
    stream_products(model, mx.float16, 2)
    launches.clear()
    assert close(logits(model, 3), wanted)
    assert launches.quantized == [[256, 128], [128], OUT, GATE_UP, DOWN, LOGITS]
    assert launches.dense == [QKV, OUT, GATE_UP, DOWN]


@pytest.mark.parametrize("family", ["qwen2", "phi3", "glm4", "cohere2", "starcoder2", "gemma3n", "olmo2", "qwen3"])
def test_families_compute_the_same(monkeypatch: pytest.MonkeyPatch, launches: Launches, family: str) -> None:
    model = tiny.tiny_model(family, dtype=mx.float16)
    num_caches = len(model.make_cache()) if hasattr(model, "make_cache") else len(model.layers)
    wanted = logits(model, 5)
    assert stream_products(model, mx.float16, num_caches) > 0
    launches.clear()
    assert close(logits(model, 5), wanted)
    assert any(len(features) > 1 for features in launches.dense) or family == "phi3", (
        "its projections are joined in one"
    )
    assert all(siblings.num_waiting == 0 for siblings in siblings_of(model))


def test_more_layers_than_a_launch_takes_are_cut(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    """Attention and MLP of this family see one array: q, k, v, then gate and up."""
    model = model_of(monkeypatch, "cohere2", **WIDE)
    stream_products(model, mx.float16, 2)
    launches.clear()
    logits(model, 4)
    assert launches.dense[:4] == [QKV, OUT, GATE_UP, DOWN]


class Pair(nn.Module):  # type: ignore[misc]
    """Two layers that see one array; `calls` says in which order they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.a = nn.Linear(64, 32)
        self.b = nn.Linear(64, 16, bias=False)
        self.order = "ab"

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        x = self.embedding(tokens)
        return mx.concatenate([getattr(self, name)(x) for name in self.order], axis=-1)


@pytest.fixture
def pair(launches: Launches) -> Pair:
    mx.random.seed(1)
    model = Pair()
    model.set_dtype(mx.float16)
    assert stream_products(model, mx.float16, 0) == 3
    launches.clear()
    return model


@pytest.mark.parametrize("order", ["ab", "ba", "a", "aab", "bb"])
def test_another_order_than_the_traced_one(pair: Pair, launches: Launches, order: str) -> None:
    pair.order = order
    found = logits(pair, 3)
    x = pair.embedding(mx.array([[0], [1], [2]]))
    weights = {"a": (pair.a.weight, pair.a.bias), "b": (pair.b.weight, mx.zeros((16,), mx.float16))}
    wanted = mx.concatenate([x @ weights[name][0].T + weights[name][1] for name in order], axis=-1)
    assert close(found, wanted)
    assert pair.a.siblings.num_waiting == 0, "nothing outlives the pass"


def test_a_layer_that_is_called_twice_has_no_siblings(launches: Launches) -> None:
    model = Pair()
    model.set_dtype(mx.float16)
    model.order = "aba"
    stream_products(model, mx.float16, 0)
    assert siblings_of(model) == []


def test_arrays_may_be_exchanged(pair: Pair, launches: Launches) -> None:
    """As by LoRA, another dtype, or a reload."""
    logits(pair, 3)
    pair.b.weight = mx.random.normal((16, 64)).astype(mx.float16)
    launches.clear()
    x = pair.embedding(mx.array([[0], [1], [2]]))
    assert close(pair.b(x), x @ pair.b.weight.T)
    assert launches.dense == [[32, 16]]
    pair.b.weight = mx.random.normal((24, 64)).astype(mx.float16)
    launches.clear()
    assert logits(pair, 3).shape == (3, 1, 32 + 24)
    assert launches.dense == [[32]]
    pair.a.bias = mx.zeros((32,), mx.float32)
    launches.clear()
    assert logits(pair, 3).dtype == mx.float32
    assert launches.dense == []


@pytest.mark.parametrize("bits", [None, 4])
def test_copies_compute_with_their_own_arrays(
    monkeypatch: pytest.MonkeyPatch, launches: Launches, bits: int | None
) -> None:
    model = model_of(monkeypatch, "llama", **WIDE)
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)
    stream_products(model, mx.float16, 2)
    wanted = logits(model, 3)
    whole, layer = copy.deepcopy(model), copy.copy(model.layers[0].mlp.down_proj)
    assert close(logits(whole, 3), wanted)
    for changed in (whole.layers[0].mlp.down_proj, layer):
        name = "weight" if bits is None else "scales"
        changed[name] = changed[name] * 0
        if bits is not None:
            changed.biases = changed.biases * 0
        assert float(mx.abs(changed(mx.ones((3, 1, 512), mx.float16))).max()) == 0.0
    assert float(mx.abs(logits(whole, 3) - wanted).max()) > 0.0
    assert close(logits(model, 3), wanted)


def test_arrays_that_were_exchanged_are_freed_by_the_next_pass(pair: Pair) -> None:
    logits(pair, 3)
    olds = [weakref.ref(pair.a.weight), weakref.ref(pair.b.weight)]
    pair.set_dtype(mx.float32)
    pair.set_dtype(mx.float16)
    logits(pair, 3)
    assert all(old() is None for old in olds)


def test_a_model_that_is_let_go_is_freed_at_once(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    model = model_of(monkeypatch, "llama", **WIDE)
    stream_products(model, mx.float16, 2)
    logits(model, 3)
    layer = weakref.ref(model.layers[0].mlp.gate_proj)
    gc.disable()
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_siblings_of_a_layer_that_is_gone_compute_alone(pair: Pair, launches: Launches) -> None:
    logits(pair, 3)
    pair.b = nn.Linear(64, 16, bias=False)
    pair.b.set_dtype(mx.float16)
    launches.clear()
    x = pair.embedding(mx.array([[0], [1], [2]]))
    assert close(pair.a(x), x @ pair.a.weight.T + pair.a.bias)
    assert launches.dense == [[32]]


def test_an_input_of_another_size_is_refused_by_mlx(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"addmm|matmul"):
        pair.a(mx.zeros((3, 1, 128), mx.float16))


def test_where_kernels_do_not_compile_nothing_is_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on this machine, if it has no GPU."""
    if mx.cuda.is_available():
        pytest.skip("they compile here")
    model = model_of(monkeypatch, "llama", **WIDE)
    assert stream_products(model, mx.float16, 2) == 0
    assert type(model.layers[0].mlp.gate_proj) is nn.Linear

"""Quantized layers that see a decode batch as one matrix compute the same numbers."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxcel_paged.models.flat_quantized import FlatQuantizedEmbedding, FlatQuantizedLinear, flatten_quantized


class Subclass(nn.QuantizedLinear):
    """Somebody else's layer."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64).to_quantized(group_size=32, bits=4)
        self.layers = [nn.QuantizedLinear(64, 96, bias=True, group_size=32, bits=4)]
        self.dense = nn.Linear(64, 8)
        self.other = Subclass(64, 32, group_size=32)
        self.norm = nn.RMSNorm(64)


@pytest.fixture
def model() -> Model:
    mx.random.seed(5)
    with mx.stream(mx.cpu):
        return Model()


@pytest.mark.parametrize("shape", [(1, 1, 64), (5, 1, 64), (1, 7, 64), (3, 4, 64), (6, 64), (64,)], ids=str)
def test_outputs_are_those_of_the_layer_as_it_was(model: Model, shape: tuple[int, ...]) -> None:
    x = mx.random.normal(shape)
    linear, logits = model.layers[0](x), model.embedding.as_linear(x)
    flatten_quantized(model)
    for found, wanted in ((model.layers[0](x), linear), (model.embedding.as_linear(x), logits)):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-5, atol=1e-5)


def test_a_decode_batch_reaches_the_product_as_one_matrix(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    flatten_quantized(model)
    seen: list[tuple[int, ...]] = []
    original = mx.quantized_matmul

    def quantized_matmul(x: mx.array, *args: object, **kwargs: object) -> mx.array:
        seen.append(tuple(x.shape))
        return original(x, *args, **kwargs)

    monkeypatch.setattr(mx, "quantized_matmul", quantized_matmul)
    model.layers[0](mx.ones((5, 1, 64)))
    model.embedding.as_linear(mx.ones((5, 1, 64)))
    model.layers[0](mx.ones((2, 3, 64)))
    assert seen == [(1, 5, 64), (1, 5, 64), (2, 3, 64)]


def test_a_decode_batch_comes_back_with_the_strides_of_its_shape(model: Model) -> None:
    """Also in the dimension of size one: MLX on CUDA copies rows that do not seem to be a row apart."""
    flatten_quantized(model)
    x = mx.random.normal((5, 1, 64))
    for found in (model.layers[0](x), model.embedding.as_linear(x)):
        mx.eval(found)
        width = found.itemsize * found.shape[2]
        assert memoryview(found).strides == (width, width, found.itemsize)


def test_lookups_are_untouched(model: Model) -> None:
    tokens = mx.array([[3], [31], [0]])
    wanted = np.asarray(model.embedding(tokens))
    flatten_quantized(model)
    np.testing.assert_array_equal(np.asarray(model.embedding(tokens)), wanted)


def test_only_the_two_layer_types_are_turned_and_only_once(model: Model) -> None:
    parameters = {name: id(value) for name, value in nn.utils.tree_flatten(model.parameters())}
    assert flatten_quantized(model) == 2
    assert flatten_quantized(model) == 0
    assert type(model.layers[0]) is FlatQuantizedLinear
    assert type(model.embedding) is FlatQuantizedEmbedding
    assert [type(module) for module in (model.dense, model.other, model.norm)] == [nn.Linear, Subclass, nn.RMSNorm]
    assert {name: id(value) for name, value in nn.utils.tree_flatten(model.parameters())} == parameters


def test_a_model_without_quantized_layers_is_left_alone() -> None:
    assert flatten_quantized(nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))) == 0

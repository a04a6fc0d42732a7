"""MLX's product of sorted experts is given rows that are a row apart, whatever made them."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from mlxcel_paged.models.expert_rows import RowStridedSwitchLinear, give_experts_row_strides, with_row_strides

NUM_CHOICES, WIDTH = 10, 64


class Subclass(SwitchLinear):
    """Somebody else's layer."""


@pytest.fixture
def odd_rows() -> mx.array:
    """`[choices, 1, width]` in which the stride of the dimension of size one is 1, as after a bias was added."""
    rows = mx.expand_dims(mx.random.normal((NUM_CHOICES, WIDTH), key=mx.random.key(3)), -2)
    mx.eval(rows)
    assert memoryview(rows).strides == (4 * WIDTH, 4, 4)
    return rows


def test_odd_strides_become_those_of_the_shape_without_a_copy(odd_rows: mx.array) -> None:
    found = with_row_strides(odd_rows)
    mx.eval(found)
    assert memoryview(found).strides == (4 * WIDTH, 4 * WIDTH, 4)
    assert np.shares_memory(np.array(found, copy=False), np.array(odd_rows, copy=False))
    assert np.array_equal(np.array(found), np.array(odd_rows))


@pytest.mark.parametrize("sorted_indices", [True, False])
def test_the_product_gets_such_rows(odd_rows: mx.array, monkeypatch: pytest.MonkeyPatch, sorted_indices: bool) -> None:
    layer = SwitchLinear(WIDTH, 8, 4, bias=True)
    layer.bias = mx.random.normal(layer.bias.shape)
    indices = mx.array(sorted([0, 0, 3, 1, 1, 1, 3, 2, 2, 0]), mx.uint32)
    wanted = np.array(layer(odd_rows, indices))
    original, seen = mx.gather_mm, []

    def gather_mm(x: mx.array, *args: object, **options: object) -> mx.array:
        seen.append(x)
        return original(x, *args, **options)

    assert give_experts_row_strides(layer) == 1
    monkeypatch.setattr(mx, "gather_mm", gather_mm)
    found = np.array(layer(odd_rows, indices, sorted_indices=sorted_indices))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    [rows] = seen
    assert memoryview(rows).strides[-2] == (4 * WIDTH if sorted_indices else 4)


def test_dense_experts_are_turned_once_and_others_not_at_all() -> None:
    model = nn.Module()
    model.dense = SwitchGLU(WIDTH, 32, 4, bias=True)
    model.quantized = SwitchLinear(WIDTH, 32, 4).to_quantized(group_size=32, bits=4)
    model.other = Subclass(WIDTH, 8, 4)
    assert give_experts_row_strides(model) == 3
    assert type(model.dense.down_proj) is RowStridedSwitchLinear
    assert type(model.other) is Subclass
    assert "Quantized" in type(model.quantized).__name__
    assert give_experts_row_strides(model) == 0

"""Dense experts of a prompt on a real GPU: sorted choices give what unsorted ones do. Skipped without one."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

if not mx.cuda.is_available():
    pytest.skip("needs a CUDA GPU and MLX's CUDA backend", allow_module_level=True)

from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from mlxcel_paged.models.expert_rows import give_experts_row_strides

NUM_EXPERTS, WIDTH, HIDDEN = 4, 64, 96
# MLX rounds allocations from here on up to multiples of this.
ALLOCATION_BYTES = 16384


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_rows_with_a_stride_of_one_element(dtype: mx.Dtype) -> None:
    """Rows made by `expand_dims`, as a bias is: MLX's product alone reads them one element apart."""
    layer = SwitchLinear(WIDTH, HIDDEN, NUM_EXPERTS, bias=False)
    layer.set_dtype(dtype)
    give_experts_row_strides(layer)
    rows = mx.expand_dims(mx.random.normal((178, WIDTH), key=mx.random.key(1)).astype(dtype), -2)
    indices = mx.sort(mx.random.randint(0, NUM_EXPERTS, (178,), key=mx.random.key(2)).astype(mx.uint32))
    found = np.array(layer(rows, indices, sorted_indices=True).astype(mx.float32))
    weights = np.array(layer.weight.astype(mx.float32), np.float64)[np.array(indices)]
    wanted = np.einsum("rk,rnk->rn", np.array(rows.astype(mx.float32), np.float64)[:, 0], weights)
    np.testing.assert_allclose(found[:, 0], wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("num_tokens", [89, 500])
def test_a_bias_that_takes_the_sum_over(num_tokens: int) -> None:
    """A product in a larger free buffer than it needs is not overwritten by its sum with a bias, which is then stored
    in the bias and has its strides. MLX takes the smallest free buffer first, so both sizes have to be at hand."""
    layer = SwitchGLU(WIDTH, HIDDEN, NUM_EXPERTS, bias=True)
    layer.update(
        {name: {"bias": mx.random.normal(layer[name].bias.shape)} for name in ("gate_proj", "up_proj", "down_proj")}
    )
    layer.set_dtype(mx.float16)
    give_experts_row_strides(layer)
    x = mx.random.normal((1, num_tokens, WIDTH), key=mx.random.key(4)).astype(mx.float16)
    indices = mx.random.randint(0, NUM_EXPERTS, (1, num_tokens, 2), key=mx.random.key(5)).astype(mx.uint32)
    mx.eval(x, indices, layer.parameters())
    # Fewer than 64 choices are not sorted.
    pieces = [layer(x[:, at : at + 16], indices[:, at : at + 16]) for at in range(0, num_tokens, 16)]
    wanted = np.array(mx.concatenate(pieces, axis=1).astype(mx.float32))
    fitting = -(-indices.size * HIDDEN * 2 // ALLOCATION_BYTES) * ALLOCATION_BYTES
    for num_fitting, num_larger in itertools.product(range(6), repeat=2):
        mx.clear_cache()
        sizes = [fitting] * num_fitting + [fitting + ALLOCATION_BYTES] * num_larger
        mx.eval([mx.zeros((size,), mx.uint8) for size in sizes])
        found = np.array(layer(x, indices).astype(mx.float32))
        np.testing.assert_allclose(found, wanted, atol=2e-2, rtol=2e-2, err_msg=f"{num_fitting} and {num_larger} free")

"""RoPE in the decode kernel on a real GPU: bit for bit what MLX's RoPE in front of it gives. Skipped without a GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

if not mx.cuda.is_available():
    pytest.skip("needs a CUDA GPU and MLX's CUDA backend", allow_module_level=True)

from rotation_case import Case, run
from test_prefill_gpu import on_gpu, own_cache_logits, poison
from tiny import VOCAB

from mlxcel_paged.attention.cuda.library import CudaKernels
from mlxcel_paged.kernels_cuda.device import current_device
from mlxcel_paged.models.paged_model import PagedModel
from mlxcel_paged.models.paged_rows import PagedRows

HEAD_DIMS = (64, 80, 96, 128, 256)


@cache
def kernels() -> CudaKernels:
    return CudaKernels(current_device(), with_jit=False)


def check(case: Case, chosen: CudaKernels) -> None:
    found, wanted = run(case, chosen, in_float32=False)
    assert np.array_equal(found.v_bits, wanted.v_bits)
    # The kernel ends with MLX's expression; a compiler that contracts it otherwise moves single bits.
    different = found.k_bits != wanted.k_bits
    assert different.sum() <= 1e-3 * wanted.k_bits.size
    assert np.abs(found.k_bits.astype(int) - wanted.k_bits)[different].max(initial=0) <= 1
    tolerance = 2e-3 if case.dtype == mx.float16 else 1.6e-2
    np.testing.assert_allclose(found.out, wanted.out, rtol=0, atol=tolerance)


@pytest.mark.parametrize("group_size", [4, 9])
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim: int, traditional: bool, group_size: int) -> None:
    """Whole and partial, plain and by frequencies, both dtypes, both page sizes, with and without new tokens."""
    for case in (
        Case(head_dim, head_dim, traditional, False, group_size, page_size=8),
        Case(head_dim, 32, traditional, True, group_size, page_size=64, dtype=mx.bfloat16),
        Case(head_dim, head_dim, traditional, True, group_size, page_size=64, append=False),
    ):
        check(case, kernels())


def test_bits_are_the_same_when_nothing_else_differs() -> None:
    """The everyday shape, both dtypes: no bit of keys or output may move."""
    for dtype in (mx.float16, mx.bfloat16):
        found, wanted = run(Case(dtype=dtype), kernels(), in_float32=False)
        assert np.array_equal(found.k_bits, wanted.k_bits)
        assert np.array_equal(found.out, wanted.out)


def test_the_form_that_mlx_compiles() -> None:
    check(Case(), CudaKernels(current_device(), with_jit=True))


def logits(family: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch, *, in_kernel: bool) -> list[Any]:
    monkeypatch.setenv("MLXCEL_PAGED_STEP_FUSION", "1" if in_kernel else "0")
    loaded = on_gpu(family, dtype)
    # Only RoPE is to differ.
    monkeypatch.setattr("mlxcel_paged.models.paged_model.stream_products", lambda *_: 0)
    options: dict[str, Any] = {"num_pages": 60, "page_size": 16, "max_slots": 4, "max_context": 512}
    paged = PagedModel(loaded, kernels=kernels(), **options)
    poison(paged)
    rows = PagedRows(paged)
    for length in (150, 9, 33):
        rows.add([token % VOCAB for token in range(length)])
    steps = [[step, step + 1, step + 2, 0] for step in range(12)]
    assert paged.launch_rows(3) == 4
    return [np.array(rows.decode(step)) for step in steps]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("family", ["llama", "glm4", "gemma3_text", "smollm3", "gemma3n"])
def test_models_give_the_logits_of_rope_outside(family: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = logits(family, dtype, monkeypatch, in_kernel=True)
    outside = logits(family, dtype, monkeypatch, in_kernel=False)
    for left, right in zip(inside, outside, strict=True):
        assert np.isfinite(left).all()
        # The same bits unless a rotation was contracted otherwise, which then goes through the whole model.
        assert np.abs(left - right).max() <= (5e-3 if dtype == mx.float16 else 4e-2) * np.abs(right).max()


def test_a_model_is_left_as_it_is_to_its_own_cache() -> None:
    loaded = on_gpu("llama", mx.float16)
    prompt, following = list(range(40)), list(range(10))
    before = own_cache_logits(loaded, prompt, following)
    mx.eval(before)
    PagedModel(loaded, num_pages=8, page_size=16, max_slots=1, max_context=128, kernels=kernels())
    after = own_cache_logits(loaded, prompt, following)
    assert all(bool(mx.array_equal(left, right)) for left, right in zip(before, after, strict=True))

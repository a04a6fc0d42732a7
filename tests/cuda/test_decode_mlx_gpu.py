"""Fused decode through MLX on a real GPU: models against mlx-lm's own caches, one step ahead, rows that come and go.
Skipped without a GPU."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

if not mx.cuda.is_available():
    pytest.skip("needs a CUDA GPU and MLX's CUDA backend", allow_module_level=True)

from test_prefill_gpu import on_gpu, own_cache_logits, poison
from tiny import BASE, FAMILIES, VARIANTS, VOCAB

from mlxcel_paged.attention.cuda.library import CudaKernels
from mlxcel_paged.kernels_cuda.device import current_device
from mlxcel_paged.models.paged_model import PagedModel
from mlxcel_paged.models.paged_rows import PagedRows
from mlxcel_paged.models.self_check import TOLERANCES

NUM_STEPS = 24


def pad(tokens: list[int], num_rows: int) -> list[int]:
    return tokens + [0] * (num_rows - len(tokens))


def differences(family: str, dtype: mx.Dtype, arm: Any, *, page_size: int, lengths: list[int]) -> list[float]:
    """Logit differences from the model's own cache, relative to the largest logit of the step, of all rows and steps;
    the largest last."""
    loaded = on_gpu(family, dtype)
    paged = PagedModel(
        loaded,
        page_size=page_size,
        num_pages=sum(-(-(length + NUM_STEPS + 1) // page_size) + 1 for length in lengths),
        max_slots=len(lengths) + 2,
        max_context=max(lengths) + NUM_STEPS + 1,
        arm=arm,
        # Compiling for every shape takes seconds; test_both_ways_to_compile compares the two.
        kernels=CudaKernels(current_device(), with_jit=False),
    )
    poison(paged)
    draw = np.random.default_rng(23)
    prompts = [draw.integers(0, VOCAB, length).tolist() for length in lengths]
    following = draw.integers(0, VOCAB, (NUM_STEPS, len(lengths)))
    rows = PagedRows(paged)
    for prompt in prompts:
        rows.add(prompt)
    found = []
    for step in ([prompt[-1] for prompt in prompts], *following.tolist()):
        found.append(rows.decode(pad(step, paged.launch_rows(len(step)))))
        mx.async_eval(found[-1])
    for step in found:
        assert np.isfinite(np.array(step)).all(), "a row, perhaps of padding, is not finite"
    found_differences = []
    for row, prompt in enumerate(prompts):
        for step, want in enumerate(own_cache_logits(loaded, prompt, following[:, row].tolist())):
            found_differences.append(float(mx.abs(found[step][row] - want).max()) / float(mx.abs(want).max()))
    assert set(paged.outcomes.snapshot()) == {"fused" if arm == "auto" else "gather:forced"}
    rows.close()
    return sorted(found_differences)


def check(family: str, dtype: mx.Dtype, *, page_size: int, lengths: list[int]) -> None:
    found = differences(family, dtype, "auto", page_size=page_size, lengths=lengths)
    if found[-1] > 1.5 * TOLERANCES[dtype]:
        # Random weights make some families amplify rounding: not more than MLX's own attention over the same pages.
        assert found[-1] <= 1.5 * differences(family, dtype, "gather", page_size=page_size, lengths=lengths)[-1]


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_every_family(family: str) -> None:
    # Cohere 2 attends in float32 when it is in float16, which pages refuse.
    check(family, mx.bfloat16 if family == "cohere2" else mx.float16, page_size=16, lengths=[150, 9, 1])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("family", ["llama", "llama_sliding", "gpt_oss"])
@pytest.mark.parametrize("page_size", [8, 32, 64, 128])
def test_page_sizes(family: str, dtype: mx.Dtype, page_size: int) -> None:
    check(family, dtype, page_size=page_size, lengths=[90, 26, 300, 7, 128])


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (16, 1), (9, 3), (12, 2)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims_and_groups(monkeypatch: pytest.MonkeyPatch, head_dim: int, heads: tuple[int, int]) -> None:
    changes = {"head_dim": head_dim, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    for name, value in changes.items():
        monkeypatch.setitem(BASE, name, value)
    check("llama", mx.float16, page_size=16, lengths=[130, 1000])


def test_rows_come_and_go_one_step_ahead() -> None:
    """Against the same traffic on the gather path: a stale plan, a late write or a page in two hands shows."""
    draw = random.Random(5)
    loaded = on_gpu("llama", mx.float16)
    options: dict[str, Any] = {"num_pages": 200, "page_size": 8, "max_slots": 12, "max_context": 512}
    both = [PagedModel(loaded, **options), PagedModel(loaded, arm="gather", **options)]
    rows = [PagedRows(model) for model in both]
    found, wanted = [], []
    for side in rows:
        side.add([1, 2, 3, 4])
    for step in range(200):
        if step % 9 == 3 and len(rows[0]) < 12:
            prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(2, 60))]
            for side in rows:
                side.add(prompt)
        if step % 14 == 13:
            victim = draw.randrange(len(rows[0]))
            for side in rows:
                side.remove(victim)
        num_live = len(rows[0])
        tokens = [draw.randrange(VOCAB) for _ in range(num_live)]
        found.append(rows[0].decode(pad(tokens, both[0].launch_rows(num_live)))[:num_live])
        wanted.append(rows[1].decode(tokens))
        mx.async_eval(found[-1], wanted[-1])
    for step, (got, want) in enumerate(zip(found, wanted, strict=True)):
        difference = float(mx.abs(got - want).max()) / float(mx.abs(want).max())
        assert difference <= 1.5 * TOLERANCES[mx.float16], (step, difference)


def test_the_same_batch_gives_the_same_bits() -> None:
    first: list[Any] = []
    for _ in range(5):
        paged = PagedModel(on_gpu("llama", mx.bfloat16), num_pages=300, page_size=16, max_slots=4, max_context=2048)
        poison(paged)
        rows = PagedRows(paged)
        for length in (1500, 700, 33):
            rows.add([token % VOCAB for token in range(length)])
        logits = [rows.decode([step, step + 1, step + 2]) for step in range(40)]
        mx.eval(logits)
        values = [np.array(step) for step in logits]
        first = first or values
        assert all(np.array_equal(left, right) for left, right in zip(first, values, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_both_ways_to_compile_give_the_same_bits(family: str) -> None:
    results = []
    for with_jit in (False, True):
        paged = PagedModel(
            on_gpu(family, mx.float16),
            num_pages=100,
            page_size=16,
            max_slots=4,
            max_context=1024,
            kernels=CudaKernels(current_device(), with_jit=with_jit),
        )
        rows = PagedRows(paged)
        for length in (600, 33):
            rows.add([token % VOCAB for token in range(length)])
        results.append([np.array(rows.decode([step, step + 1])) for step in range(20)])
    assert all(np.array_equal(left, right) for left, right in zip(*results, strict=True))


def test_two_models_of_other_dtypes_take_turns() -> None:
    """One process, one shape, two dtypes: a kernel that is cached by name alone would serve the wrong one."""
    models = [
        PagedModel(on_gpu("llama", dtype), num_pages=40, page_size=16, max_slots=2, max_context=256)
        for dtype in (mx.float16, mx.bfloat16)
    ]
    rows = [PagedRows(model) for model in models]
    prompt = list(range(60))
    for side in rows:
        side.add(prompt)
    for step in range(4):
        left, right = (side.decode([step]) for side in rows)
        assert float(mx.abs(left - right).max()) <= 0.1 * float(mx.abs(left).max())


def test_decode_steps_in_flight_copy_no_pool() -> None:
    """4 GiB of pools and ten steps in flight: any functional update would show in the peak."""
    paged = PagedModel(
        on_gpu("llama", mx.float16), num_pages=(4 << 30) // (2 * 2 * 2 * 64 * 128 * 2), page_size=128, max_slots=4,
        max_context=256,
    )  # fmt: skip
    rows = PagedRows(paged)
    for length in (9, 30, 100):
        rows.add([token % VOCAB for token in range(length)])
    mx.eval(rows.decode([1, 2, 3]))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    steps = [rows.decode([step, step, step]) for step in range(10)]
    for step in steps:
        mx.async_eval(step)
    mx.eval(steps)
    assert mx.get_peak_memory() - before < 64 << 20


def test_more_than_2_to_the_32_elements_in_a_pool() -> None:
    """Pages at the far end of a pool of 9 GiB."""
    loaded = on_gpu("llama", mx.float16)
    num_pages = 280_000  # x 2 heads x 128 tokens x 64 dims
    paged = PagedModel(loaded, num_pages=num_pages, page_size=128, max_slots=1, max_context=512)
    assert paged.pools.k(0).size > 2**32
    paged.page_pools[0].acquire(num_pages - 3)
    rows = PagedRows(paged)
    prompt = [token % VOCAB for token in range(200)]
    rows.add(prompt)
    found = rows.decode([prompt[-1]])
    want = own_cache_logits(loaded, prompt, [])[0]
    assert float(mx.abs(found[0] - want).max()) <= 1.5 * TOLERANCES[mx.float16] * float(mx.abs(want).max())

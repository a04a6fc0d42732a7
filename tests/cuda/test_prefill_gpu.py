"""Chunked prefill and gather decode of tiny models on a real GPU, against mlx-lm's own caches. Skipped without one."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

if not mx.cuda.is_available():
    pytest.skip("needs a CUDA GPU and MLX's CUDA backend", allow_module_level=True)

from mlx_lm.models.cache import make_prompt_cache
from tiny import BASE, FAMILIES, VARIANTS, VOCAB, loaded_tiny

from mlxcel_paged import _core
from mlxcel_paged.attention import chunk_attention
from mlxcel_paged.attention.chunk_attention import WINDOW_BLOCK_TOKENS
from mlxcel_paged.models.loader import LoadedModel
from mlxcel_paged.models.paged_model import PagedModel
from mlxcel_paged.models.paged_rows import PagedRows
from mlxcel_paged.models.self_check import TOLERANCES

NUM_STEPS = 6


def on_gpu(family: str, dtype: mx.Dtype) -> LoadedModel:
    return dataclasses.replace(loaded_tiny(family, dtype=dtype), device="gpu")


def own_cache_logits(loaded: LoadedModel, prompt: list[int], following: list[int]) -> list[mx.array]:
    caches = make_prompt_cache(loaded.model)
    if len(prompt) > 1:
        loaded.model(mx.array([prompt[:-1]]), cache=caches)
    return [
        loaded.model(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32) for token in (prompt[-1], *following)
    ]


def poison(paged: PagedModel) -> None:
    """Fills all pages with NaN, in place."""
    kernels, pools = paged.pools.page_kernels, paged.pools
    assert kernels is not None
    for layer in range(pools.layout.num_layers):
        group = pools.layout.group_of_layer[layer]
        places = mx.arange(pools.num_pages[group] * pools.page_size, dtype=mx.int32)
        _, num_heads, _, head_dim = pools.k(layer).shape
        nan = mx.full((places.size, num_heads, head_dim), float("nan"), pools.dtype)
        mx.eval(kernels.write(pools.view_k(layer), pools.view_v(layer), nan, nan, places))


def check(family: str, dtype: mx.Dtype, *, page_size: int, chunk: int, lengths: list[int], **sizes: int) -> PagedModel:
    loaded = on_gpu(family, dtype)
    options: dict[str, Any] = {
        "num_pages": sum(-(-(length + NUM_STEPS + 1) // page_size) for length in lengths),
        "max_slots": len(lengths),
        "max_context": max(lengths) + NUM_STEPS + 1,
        **sizes,
    }
    paged = PagedModel(loaded, page_size=page_size, arm="gather", **options)
    poison(paged)
    random = np.random.default_rng(17)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in lengths]
    following = random.integers(0, VOCAB, (NUM_STEPS, len(lengths)))
    rows = PagedRows(paged)
    for prompt in prompts:
        rows.add(prompt, chunk=chunk)
    found = []
    for step in ([prompt[-1] for prompt in prompts], *following.tolist()):
        found.append(rows.decode(step))
        mx.async_eval(found[-1])
    for row, prompt in enumerate(prompts):
        for step, want in enumerate(own_cache_logits(loaded, prompt, following[:, row].tolist())):
            difference = float(mx.abs(found[step][row] - want).max()) / float(mx.abs(want).max())
            # Both sides round every layer in 16 bits, along other ways; a wrong page, mask or position is above 0.1.
            assert difference <= 1.5 * TOLERANCES[dtype], (row, step, difference)
    assert set(paged.outcomes.snapshot_prefill()) == {"chunk_sdpa", "write_only"}
    assert set(paged.outcomes.snapshot()) == {"gather:forced"}
    rows.close()
    return paged


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_every_family(family: str) -> None:
    # Cohere 2 attends in float32 when it is in float16, which pages refuse.
    dtype = mx.bfloat16 if family == "cohere2" else mx.float16
    check(family, dtype, page_size=16, chunk=37, lengths=[150, 9, 1])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("family", ["llama", "llama_sliding", "gpt_oss", "gemma2"])
@pytest.mark.parametrize(("page_size", "chunk"), [(5, 64), (8, 1), (32, 33), (128, 100), (16, 512)])
def test_chunk_borders_and_page_sizes(family: str, dtype: mx.Dtype, page_size: int, chunk: int) -> None:
    check(family, dtype, page_size=page_size, chunk=chunk, lengths=[90, 26])


@pytest.mark.parametrize("family", ["llama", "llama_sliding"])
def test_chunks_of_the_default_size(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Long enough for windows in several blocks, and for commits in the middle of a pass."""
    monkeypatch.setitem(BASE, "max_position_embeddings", 8192)
    monkeypatch.setitem(VARIANTS, "llama_sliding", ("llama", {**VARIANTS["llama_sliding"][1], "sliding_window": 700}))
    check(family, mx.float16, page_size=32, chunk=2048, lengths=[5000])


def test_one_query_behind_a_whole_block_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX takes a slice of certain sizes, as keys of one query, for a prefix of a cache and reads in front of it."""
    monkeypatch.setitem(BASE, "max_position_embeddings", 8192)
    monkeypatch.setitem(VARIANTS, "llama_sliding", ("llama", {**VARIANTS["llama_sliding"][1], "sliding_window": 512}))
    check(
        "llama_sliding", mx.float16, page_size=32, chunk=WINDOW_BLOCK_TOKENS + 1, lengths=[2 * WINDOW_BLOCK_TOKENS + 4]
    )


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    """MLX's attention is fused up to 128 and not beyond."""
    monkeypatch.setitem(BASE, "head_dim", head_dim)
    check("llama", mx.float16, page_size=16, chunk=48, lengths=[130])


def test_blocks_of_a_window_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_attention, "WINDOW_BLOCK_TOKENS", 16)
    check("llama_sliding", mx.float16, page_size=16, chunk=100, lengths=[230])


def test_a_forked_page_is_copied_before_it_is_written() -> None:
    paged = PagedModel(on_gpu("llama", mx.float16), num_pages=8, page_size=8, max_slots=2, max_context=32, arm="gather")
    poison(paged)
    [pool] = paged.page_pools
    table = _core.PageTable(pool, 8)
    table.append(12)
    paged.prefill(list(range(12)), [table], 0)
    child = table.fork()
    appended = child.append(2)
    paged.copy_pages(0, appended.copies)
    paged.prefill([5, 6], [child], 12)
    for layer in range(2):
        keys = np.array(paged.pools.k(layer) + 0)
        assert not np.isnan(keys[table.pages[-1], :, :4]).any()
        assert np.array_equal(keys[child.pages[-1], :, :4], keys[table.pages[-1], :, :4])
        assert np.isnan(keys[table.pages[-1], :, 4:]).all()
        assert not np.isnan(keys[child.pages[-1], :, 4:6]).any()
        assert np.isnan(keys[child.pages[-1], :, 6:]).all()


def test_large_pools_are_not_copied() -> None:
    """4 GiB of pools; a pass, a page copy and decode steps in flight together."""
    mx.reset_peak_memory()
    num_pages = 1 << 18
    paged = PagedModel(
        on_gpu("llama", mx.float16), num_pages=num_pages, page_size=16, max_slots=1, max_context=512, arm="gather"
    )
    before = mx.get_active_memory()
    assert paged.pools.nbytes == 2 * 2 * num_pages * 2 * 16 * 64 * 2
    rows = PagedRows(paged)
    rows.add(np.random.default_rng(1).integers(0, VOCAB, 300).tolist(), chunk=128)
    paged.copy_pages(0, [(0, num_pages - 1)])
    for token in range(8):
        mx.async_eval(rows.decode([token]))
    mx.synchronize()
    assert mx.get_peak_memory() - before < paged.pools.nbytes // 16
    rows.close()

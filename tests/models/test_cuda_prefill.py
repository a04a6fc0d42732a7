"""Prefill and gather decode as on a CUDA device, in chunks, against the logits of the model's own cache."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from cuda_on_cpu import cuda_paged_model
from test_families import stock_logits
from tiny import FAMILIES, VARIANTS, VOCAB, loaded_tiny

from mlxcel_paged import _core
from mlxcel_paged.attention import chunk_attention
from mlxcel_paged.models.paged_rows import PagedRows

NUM_STEPS = 6


def check(monkeypatch: pytest.MonkeyPatch, family: str, *, page_size: int, chunk: int, prompts: list[int]) -> None:
    monkeypatch.setattr(chunk_attention, "WINDOW_BLOCK_TOKENS", 8)  # far below a chunk, as on the device
    loaded = loaded_tiny(family)
    paged, _ = cuda_paged_model(
        loaded, num_pages=-(-200 // page_size) + 8, page_size=page_size, max_slots=3, max_context=128
    )
    random = np.random.default_rng(5)
    tokens = [random.integers(0, VOCAB, length).tolist() for length in prompts]
    following = random.integers(0, VOCAB, (NUM_STEPS, len(tokens)))
    rows = PagedRows(paged)
    for prompt in tokens:
        rows.add(prompt, chunk=chunk)
    found = [rows.decode(step) for step in ([prompt[-1] for prompt in tokens], *following.tolist())]
    for row, prompt in enumerate(tokens):
        for step, want in enumerate(stock_logits(loaded, prompt, following[:, row].tolist())):
            difference = mx.abs(found[step][row] - want).max()
            assert float(difference) <= 2e-4 * float(mx.abs(want).max()), (row, step)
    assert set(paged.outcomes.snapshot_prefill()) == {"chunk_sdpa", "write_only"}
    assert set(paged.outcomes.snapshot()) == {"gather:forced"}
    rows.close()


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_every_family(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    check(monkeypatch, family, page_size=5, chunk=13, prompts=[61, 7, 1])


@pytest.mark.parametrize("family", ["llama", "llama_sliding", "gpt_oss", "gemma2", "gemma3n"])
@pytest.mark.parametrize(("page_size", "chunk"), [(8, 1), (32, 24), (128, 25), (5, 60), (16, 128)])
def test_chunk_borders_and_page_sizes(monkeypatch: pytest.MonkeyPatch, family: str, page_size: int, chunk: int) -> None:
    check(monkeypatch, family, page_size=page_size, chunk=chunk, prompts=[90, 26])


def test_pages_that_left_the_window_may_be_gone_between_chunks() -> None:
    loaded = loaded_tiny("llama_sliding")
    paged, _ = cuda_paged_model(loaded, num_pages=24, page_size=5, max_slots=1, max_context=128)
    prompt = np.random.default_rng(3).integers(0, VOCAB, 90).tolist()
    tables = [
        _core.PageTable(pool, 5, group.window)
        for pool, group in zip(paged.page_pools, paged.layout.groups, strict=True)
    ]
    retired = 0
    for start in range(0, 90, 11):
        chunk = prompt[start : start + 11]
        if start + len(chunk) == 90:
            chunk = chunk[:-1]
        for table in tables:
            table.append(len(chunk))
        paged.prefill(chunk, tables, start)
        retired += sum(len(table.retire_head()) for table in tables)
    assert retired > 10
    for plan, table in zip(paged.plans, tables, strict=True):
        slot = plan.admit(table.pages, table.kv_len, table.first_page_offset, table.num_tokens)
        for page in table.append(1).new_pages:
            plan.append_page(slot, page)
        plan.advance()
    [want] = stock_logits(loaded, prompt, [])
    assert float(mx.abs(paged.decode(prompt[-1:])[0] - want).max()) <= 2e-4 * float(mx.abs(want).max())


def test_a_forked_page_is_copied_before_it_is_written() -> None:
    paged, double = cuda_paged_model(loaded_tiny("llama"), num_pages=8, page_size=8, max_slots=2, max_context=32)
    [pool] = paged.page_pools
    table = _core.PageTable(pool, 8)
    table.append(12)
    paged.prefill(list(range(12)), [table], 0)
    before = [np.array(paged.pools.k(layer))[table.pages[-1], :, :4] for layer in range(2)]
    child = table.fork()
    appended = child.append(2)
    assert len(appended.copies) == 1
    paged.copy_pages(0, appended.copies)
    paged.prefill([5, 6], [child], 12)
    assert double.launches == ["page_write"] * 2 + ["page_copy"] * 2 + ["page_write", "page_gather", "page_write"]
    for layer in range(2):
        keys = np.array(paged.pools.k(layer))
        assert np.array_equal(keys[table.pages[-1], :, :4], before[layer])
        assert np.array_equal(keys[child.pages[-1], :, :4], before[layer])
        assert np.isnan(keys[table.pages[-1], :, 4:]).all()
        assert not np.isnan(keys[child.pages[-1], :, 4:6]).any()
        assert np.isnan(keys[child.pages[-1], :, 6:]).all()


def test_the_gather_reads_after_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order reaches the device only if the pages that are read are computed from the write's token."""
    paged, double = cuda_paged_model(loaded_tiny("gemma3n"), num_pages=8, page_size=8, max_slots=2, max_context=32)
    rows = PagedRows(paged)
    rows.add([1, 2, 3])
    attended: list[tuple[int, ...]] = []
    take = mx.take

    def watched_take(pool: mx.array, ids: mx.array, axis: int) -> mx.array:
        attended.append(tuple(np.array(ids).reshape(-1).tolist()))
        return take(pool, ids - double.order_token, axis=axis)

    monkeypatch.setattr(mx, "take", watched_take)
    double.order_token = 1000
    mx.eval(rows.decode([4]))
    # Layers 2 and 3 share the KV of layers before them: they only read, and still come after the write.
    assert len(attended) == 2 * 4
    assert all(page >= 1000 for pages in attended for page in pages)

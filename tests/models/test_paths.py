"""Which path a launch takes is decided per step, and every launch is counted."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest
from tiny import BASE, loaded_tiny

from mlxcel_paged.models.paged_model import PagedModel
from mlxcel_paged.models.paged_rows import PagedRows

VARIABLE = "MLXCEL_PAGED_ATTENTION_NATIVE"


def paged(arm: Any = "auto", page_size: int = 16) -> PagedModel:
    return PagedModel(loaded_tiny("llama"), num_pages=16, page_size=page_size, max_slots=2, max_context=64, arm=arm)


def run(model: PagedModel, num_steps: int = 2) -> dict[str, int]:
    rows = PagedRows(model)
    rows.add([1, 2, 3, 4, 5], chunk=2)
    rows.add([7, 8])
    for token in range(num_steps):
        rows.decode([token, token])
    rows.close()
    return model.outcomes.snapshot()


@pytest.mark.parametrize(
    ("value", "arm", "outcome"),
    [
        (None, "auto", "fused"),
        ("", "auto", "fused"),
        ("1", "auto", "fused"),
        ("0", "auto", "gather:kill_switch"),
        ("off", "fused", "gather:kill_switch"),
        (None, "gather", "gather:forced"),
        ("1", "gather", "gather:forced"),
    ],
)
def test_every_layer_launch_is_counted(
    monkeypatch: pytest.MonkeyPatch, value: str | None, arm: str, outcome: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    model = paged(arm)
    assert run(model) == {outcome: 2 * 2}
    # Chunks of 2 and 2 tokens, and one of 1; the last layer of a chunk only writes.
    assert model.outcomes.snapshot_prefill() == {outcome: 3, "write_only": 3}


def test_the_switch_works_while_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    model = paged()
    run(model, num_steps=1)
    monkeypatch.setenv(VARIABLE, "0")
    assert run(model, num_steps=1) == {"fused": 2, "gather:kill_switch": 2}


@pytest.mark.parametrize("value", [None, "1"])
def test_a_shape_that_no_kernel_serves_gathers(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    monkeypatch.setitem(BASE, "head_dim", 48)
    assert run(paged("fused")) == {"gather:unsupported_shape": 4}


def test_tokens_that_are_not_one_per_row_are_refused() -> None:
    model = paged()
    rows = PagedRows(model)
    rows.add([1, 2])
    with pytest.raises(ValueError, match="one per row"):
        rows.decode([1, 2])


def test_prefill_computes_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model builds them, and nobody evaluates them: memory never grows by as much as they would take."""
    monkeypatch.setitem(BASE, "vocab_size", 50_000)
    num_tokens = 128
    logits_bytes = num_tokens * 50_000 * 4
    for arm in ("fused", "gather"):
        model = PagedModel(loaded_tiny("llama"), num_pages=16, page_size=16, max_slots=1, max_context=256, arm=arm)
        rows = PagedRows(model)
        gc.collect()  # the model before may still be there
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        rows.add(list(range(num_tokens + 1)))
        assert mx.get_peak_memory() - before < logits_bytes / 4
        mx.reset_peak_memory()
        mx.eval(rows.decode([1]))
        assert mx.get_peak_memory() - before > 50_000 * 4


def test_pages_per_group() -> None:
    loaded = loaded_tiny("gemma3_text")
    model = PagedModel(loaded, num_pages=[5, 9], page_size=8, max_slots=1, max_context=64)
    assert [pool.num_pages for pool in model.page_pools] == [5, 9]
    assert [model.pools.k(layer).shape for layer in (0, 1)] == [(5, 2, 8, 64), (9, 2, 8, 64)]
    with pytest.raises(ValueError, match="2 KV groups"):
        PagedModel(loaded, num_pages=[5], page_size=8, max_slots=1, max_context=64)

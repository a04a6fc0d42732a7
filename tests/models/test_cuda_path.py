"""The CUDA path around its kernels, which doubles stand for: plan on the device, padding, launches."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cuda_double import KernelsDouble, PlanStepDouble
from tiny import VOCAB, loaded_tiny

from mlxcel_paged import _core
from mlxcel_paged.attention.cuda.decode import CudaDecode
from mlxcel_paged.engine.decode_tokens import DecodeTokens
from mlxcel_paged.engine.paged_runner import PagedRunner
from mlxcel_paged.models.paged_model import PagedModel
from mlxcel_paged.models.paged_rows import PagedRows

# gpt_oss, which has sinks, is missing: MLX multiplies experts on the CPU in float32 alone.
FAMILIES = ("llama", "gemma2", "gemma3_text", "llama_sliding", "gemma3n")


def models(family: str, kernels: KernelsDouble, *, max_slots: int = 6, page_size: int = 16) -> list[PagedModel]:
    """The model on the doubles, and on the CPU kernel."""
    loaded = loaded_tiny(family, dtype=mx.float16)
    options = {"num_pages": 40, "page_size": page_size, "max_slots": max_slots, "max_context": 256}
    paged = PagedModel(replace(loaded, device="gpu"), kernels=kernels, **options)
    kernels.page_double.register(paged.pools)
    return [paged, PagedModel(loaded, **options)]


def pad(tokens: list[int], num_rows: int) -> list[int]:
    return tokens + [0] * (num_rows - len(tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_cpu_kernel(family: str) -> None:
    draw = random.Random(3)
    kernels = KernelsDouble()
    both = models(family, kernels)
    rows = [PagedRows(model) for model in both]
    for length in (37, 5, 18):
        prompt = [draw.randrange(VOCAB) for _ in range(length)]
        for side in rows:
            side.add(prompt, chunk=16)
    for _ in range(20):
        tokens = [draw.randrange(VOCAB) for _ in range(3)]
        num_rows = both[0].launch_rows(3)
        assert num_rows == 4
        found, wanted = rows[0].decode(pad(tokens, num_rows)), rows[1].decode(tokens)
        assert found.shape[0] == 4
        assert np.isfinite(np.array(found)).all(), "a padding row is not finite"
        difference = mx.abs(found[:3] - wanted).max() / mx.abs(wanted).max()
        assert difference.item() < 2e-2
    layers = both[0].layout.num_layers
    assert set(both[0].outcomes.snapshot()) == {"fused"}
    assert both[0].outcomes.snapshot()["fused"] >= 20 * layers
    if family == "llama":
        # One group, 20 steps, 6 page crossings of which two fall together at most.
        assert kernels.step_double.num_words[-19:].count(0) >= 13


def test_a_steady_step_carries_no_word() -> None:
    kernels = KernelsDouble()
    model = models("llama", kernels)[0]
    rows = PagedRows(model)
    rows.add(list(range(20)))
    rows.decode([1])
    kernels.step_double.num_words.clear()
    for token in range(13):
        rows.decode([token])
    # The 33rd token opens the third page.
    assert sum(kernels.step_double.num_words) == 1
    assert len(kernels.step_double.num_words) == 13


def test_many_words_take_launches_of_their_own() -> None:
    kernels = KernelsDouble()
    model = models("llama", kernels, page_size=8)[0]
    rows = PagedRows(model)
    rows.add_synthetic(250)
    rows.decode([1])
    assert len(kernels.step_double.num_words) > 1
    assert sum(kernels.step_double.num_words) >= 32, "the pages of the row"


def test_the_kill_switch_and_back_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    both = models("llama", KernelsDouble())
    rows = [PagedRows(model) for model in both]
    prompt = list(range(1, 30))
    for side in rows:
        side.add(prompt)
    for step in range(6):
        monkeypatch.setenv("MLXCEL_PAGED_ATTENTION_NATIVE", "0" if step in (2, 3) else "1")
        found, wanted = rows[0].decode([step]), rows[1].decode([step])
        assert (mx.abs(found - wanted).max() / mx.abs(wanted).max()).item() < 2e-2
    layers = both[0].layout.num_layers
    assert both[0].outcomes.snapshot() == {"fused": 4 * layers, "gather:kill_switch": 2 * layers}


def test_a_step_reads_the_kill_switch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models("llama", KernelsDouble())[0]
    rows = PagedRows(model)
    for _ in range(3):
        rows.add([1, 2, 3])
    num_layers = model.layout.num_layers
    monkeypatch.setenv("MLXCEL_PAGED_ATTENTION_NATIVE", "1")
    num_rows = model.launch_rows(3)
    monkeypatch.setenv("MLXCEL_PAGED_ATTENTION_NATIVE", "0")
    rows.decode(pad([4, 5, 6], num_rows))  # padded for the path that was chosen then
    assert model.outcomes.snapshot() == {"fused": num_layers}
    rows.decode([4, 5, 6])  # alone, it reads the switch itself
    assert model.outcomes.snapshot() == {"fused": num_layers, "gather:kill_switch": num_layers}


def test_rows_that_do_not_fit_the_plan_are_refused_on_either_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models("llama", KernelsDouble())[0]
    rows = PagedRows(model)
    for _ in range(2):
        rows.add([1, 2, 3])
    for tokens in ([4], [4] * 7):
        with pytest.raises(ValueError, match="num_rows"):
            model.decode(tokens)
    monkeypatch.setenv("MLXCEL_PAGED_ATTENTION_NATIVE", "0")
    for tokens in ([4], [4] * 3):
        with pytest.raises(ValueError, match="one per row"):
            model.decode(tokens)
    with pytest.raises(ValueError, match="one per row"):
        model.decode(mx.zeros((2, 1), mx.int32))


def test_a_page_size_that_is_no_power_of_two_gathers() -> None:
    model = models("llama", KernelsDouble(), page_size=24)[0]
    rows = PagedRows(model)
    rows.add([1, 2, 3])
    assert model.launch_rows(1) == 1
    rows.decode([4])
    assert set(model.outcomes.snapshot()) == {"gather:unsupported_page_size"}


def test_rows_come_and_go_inside_a_bucket() -> None:
    draw = random.Random(5)
    both = models("llama", KernelsDouble())
    rows = [PagedRows(model) for model in both]
    for side in rows:
        side.add([1, 2, 3, 4])
    for step in range(30):
        if step % 7 == 3:
            prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(2, 40))]
            for side in rows:
                side.add(prompt)
        if step % 11 == 10:
            for side in rows:
                side.remove(0)
        num_live = len(rows[0])
        tokens = [draw.randrange(VOCAB) for _ in range(num_live)]
        found = rows[0].decode(pad(tokens, both[0].launch_rows(num_live)))
        wanted = rows[1].decode(tokens)
        assert (mx.abs(found[:num_live] - wanted).max() / mx.abs(wanted).max()).item() < 2e-2


class RefusedError(Exception):
    """Raised in the place of a model's last layer, or of its sampler."""


class RefusingNorm(nn.Module):  # type: ignore[misc]
    def __call__(self, x: mx.array) -> mx.array:
        raise RefusedError


class RefusingTokens(DecodeTokens):
    def sample(self, logits: Any, step: Any) -> Any:
        raise RefusedError


@pytest.mark.parametrize("fails_in", ["model", "sampler"])
def test_nothing_runs_the_launches_of_a_step_that_failed(monkeypatch: pytest.MonkeyPatch, fails_in: str) -> None:
    """They write tokens to pages that may be another sequence's by the time that the next step runs."""
    outputs: list[mx.array] = []

    def noting(self: CudaDecode, *args: Any, **kwargs: Any) -> mx.array:
        outputs.append(decode(self, *args, **kwargs))
        return outputs[-1]

    decode = CudaDecode.decode
    monkeypatch.setattr(CudaDecode, "decode", noting)
    kernels = KernelsDouble()
    model = models("llama", kernels)[0]
    rows = PagedRows(model)
    rows.add([1, 2, 3])
    rows.decode([4])
    of_good_step, inner = outputs[-1], model._model.model
    for _ in range(2):
        outputs.clear()
        if fails_in == "model":
            with monkeypatch.context() as patched:
                patched.setitem(inner, "norm", RefusingNorm())
                with pytest.raises(RefusedError):
                    rows.decode([5])
        else:
            step: Any = SimpleNamespace(copies=[], prefill=[], decode=[SimpleNamespace(token_id=5, previous_row=0)])
            with pytest.raises(RefusedError):
                PagedRunner(model, RefusingTokens(mx, on_cpu=False)).launch(step)
        assert len(outputs) == model.layout.num_layers
    rows.decode([6])
    assert kernels.step_double.after is of_good_step
    rows.decode([7])
    assert kernels.step_double.after is outputs[-model.layout.num_layers - 1]


def test_a_prompt_that_failed_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory runs out while its launches are sent off."""
    waited: list[bool] = []
    monkeypatch.setattr(mx, "synchronize", lambda: waited.append(True))
    model = models("llama", KernelsDouble())[0]
    table = _core.PageTable(model.page_pools[0], model.page_size)
    table.append(3)
    sequence = SimpleNamespace(tables=[table])
    step: Any = SimpleNamespace(copies=[], prefill=[SimpleNamespace(sequence=sequence, token_ids=[1, 2, 3], start=0)])
    monkeypatch.setitem(model._model.model.layers[-1], "input_layernorm", RefusingNorm())
    with pytest.raises(RefusedError):
        PagedRunner(model, DecodeTokens(mx, on_cpu=False)).launch(step)
    assert waited == [True]


def test_words_that_a_failed_step_should_have_written_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> list[mx.array]:
        raise RefusedError

    kernels = KernelsDouble()
    both = models("gemma3_text", kernels, page_size=8)
    rows = [PagedRows(model) for model in both]
    for side in rows:
        side.add(list(range(1, 17)))
        side.decode([3])
    for side in rows:
        side.add(list(range(20, 60)))  # its pages are words for the step that fails
    wanted = rows[1].decode([4, 5])
    with monkeypatch.context() as patched:
        patched.setattr(PlanStepDouble, "__call__", refuse)
        with pytest.raises(RefusedError):
            rows[0].decode([4, 5])
    found = both[0].decode([4, 5])
    assert (mx.abs(found - wanted).max() / mx.abs(wanted).max()).item() < 2e-2
    found, wanted = (side.decode([6, 7]) for side in rows)
    assert (mx.abs(found - wanted).max() / mx.abs(wanted).max()).item() < 2e-2

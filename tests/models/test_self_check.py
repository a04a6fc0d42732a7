"""The self-check passes what is right, catches what is wrong, and leaves nothing behind."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import loaded_tiny

from mlxcel_paged.attention.decode_step import DecodeStep
from mlxcel_paged.attention.prefill_step import PrefillStep
from mlxcel_paged.errors import SelfCheckError, UnsupportedModelError
from mlxcel_paged.kvcache.handle import KeyHandle
from mlxcel_paged.models import self_check as self_check_module
from mlxcel_paged.models.loader import LoadedModel
from mlxcel_paged.models.paged_model import PagedModel
from mlxcel_paged.models.self_check import TOLERANCES, self_check


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("arm", ["fused", "gather"])
def test_a_sound_model_passes(arm: Any, dtype: mx.Dtype) -> None:
    report = self_check(loaded_tiny("llama", dtype=dtype), page_size=16, arm=arm)
    assert report.largest_difference <= report.tolerance == TOLERANCES[dtype]
    assert report.outcomes == {"fused" if arm == "fused" else "gather:forced": 2 * 3}


def test_a_model_with_two_groups_passes() -> None:
    assert self_check(loaded_tiny("gemma3_text"), page_size=8).largest_difference < 1e-4


def test_a_wrong_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = DecodeStep.begin

    def late(self: DecodeStep, tokens: mx.array) -> None:
        begin(self, tokens)
        self.offset = self.offset + 1

    monkeypatch.setattr(DecodeStep, "begin", late)
    with pytest.raises(SelfCheckError, match=r"step 0, row 0.*tolerance"):
        self_check(loaded_tiny("llama"), page_size=16)


def test_a_missing_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of the prompt never reaches its pages."""
    attend = PrefillStep.attend

    def forgetful(self: PrefillStep, handle: KeyHandle, queries: mx.array, **options: Any) -> mx.array:
        if handle.layer == 1:
            handle.k_new = mx.zeros_like(handle.k_new)
        return attend(self, handle, queries, **options)

    monkeypatch.setattr(PrefillStep, "attend", forgetful)
    with pytest.raises(SelfCheckError):
        self_check(loaded_tiny("llama"), page_size=16)


def test_a_wrong_product_of_a_layer_that_was_turned_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model is compared with is computed before a paged model puts our products into it."""

    class Turned(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) * 1.5

    class TurningPagedModel(PagedModel):
        def __init__(self, loaded: LoadedModel, **options: Any) -> None:
            super().__init__(loaded, **options)
            loaded.model.layers[0].mlp.up_proj.__class__ = Turned

    monkeypatch.setattr(self_check_module, "PagedModel", TurningPagedModel)
    with pytest.raises(SelfCheckError, match="tolerance"):
        self_check(loaded_tiny("llama"), page_size=16)


def test_not_a_number_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = DecodeStep.attend
    monkeypatch.setattr(DecodeStep, "attend", lambda *arguments, **options: attend(*arguments, **options) * math.nan)
    with pytest.raises(SelfCheckError, match="nan"):
        self_check(loaded_tiny("llama"), page_size=16)


def test_a_failure_inside_is_a_self_check_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> mx.array:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(DecodeStep, "attend", broken)
    with pytest.raises(SelfCheckError, match="no such kernel"):
        self_check(loaded_tiny("llama"), page_size=16)


def test_what_cannot_be_paged_stays_an_unsupported_model() -> None:
    model = loaded_tiny("llama")
    model.model.make_cache = lambda: [object(), object()]
    with pytest.raises(UnsupportedModelError):
        self_check(model, page_size=16)

"""Tiny models must not owe a result to rounding: which experts a token gets is beyond doubt in 16 bits."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiny import VOCAB, router_of, tiny_model

# A unit in the last place of bfloat16 is at most this fraction of the value.
BFLOAT16_ULP = 2.0**-7


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_experts_are_well_separated(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    model = tiny_model(family)
    routers = [router_of(layer) for layer in model.layers]
    assert None not in routers
    seen: dict[int, list[mx.array]] = {id(router): [] for router in routers}
    product = nn.Linear.__call__

    def watched(self: nn.Linear, x: mx.array) -> mx.array:
        y = product(self, x)
        if id(self) in seen:
            seen[id(self)].append(y)
        return y

    monkeypatch.setattr(nn.Linear, "__call__", watched)
    for seed in range(8):
        prompt = np.random.default_rng(seed).integers(0, VOCAB, (4, 128))
        mx.eval(model(mx.array(prompt)))
    for layer, outputs in enumerate(seen.values()):
        logits = np.concatenate([np.array(output).reshape(-1, output.shape[-1]) for output in outputs])
        assert len(logits) == 8 * 4 * 128
        ordered = np.sort(logits, axis=-1)
        gap = (ordered[:, -2] - ordered[:, -3]) / np.abs(logits).max(axis=-1)
        assert gap.min() > 16 * BFLOAT16_ULP, (layer, gap.min())
        chosen = np.argsort(logits, axis=-1)[:, -2:]
        assert np.bincount(chosen.ravel(), minlength=4).min() > len(logits) // 4, "experts that no token gets"

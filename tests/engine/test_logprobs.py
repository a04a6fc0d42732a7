"""Log-probabilities against float64, whatever the neighbours ask for, on NumPy and on MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_paged.engine.logprobs import Logprobs
from mlxcel_paged.request import SamplingParams, TokenLogprobs

from .test_sampler import Row, logits_of

both_modules = pytest.mark.parametrize("xp", [np, mx], ids=["numpy", "mlx"])


def logprobs_of(xp: Any, logits: Any, tokens: list[int], num_logprobs: list[int | None]) -> list[TokenLogprobs | None]:
    rows = [Row(SamplingParams(num_logprobs=number, temperature=0.3)) for number in num_logprobs]
    return Logprobs(xp, xp.array(logits), xp.array(tokens), rows).per_row()


@both_modules
def test_values_and_order_are_those_of_a_float64_softmax(xp: Any) -> None:
    logits = logits_of(4)
    tokens = [5, 299, int(logits[2].argmax()), 0]
    result = logprobs_of(xp, logits, tokens, [0, 20, 3, None])
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    assert result[3] is None
    for index, num_top in enumerate([0, 20, 3]):
        entry = result[index]
        assert entry is not None
        assert entry.logprob == pytest.approx(exact[index, tokens[index]], abs=1e-5)
        order = np.argsort(-exact[index], kind="stable")[:num_top].tolist()
        assert [token for token, _ in entry.top] == order
        assert [value for _, value in entry.top] == pytest.approx(exact[index, order].tolist(), abs=1e-5)
        assert entry.logprob <= 0


@both_modules
def test_a_row_does_not_depend_on_what_its_neighbours_ask_for(xp: Any) -> None:
    # Few distinct values, so that ties are everywhere.
    logits = np.random.default_rng(0).integers(0, 4, (4, 300)).astype(np.float32)
    tokens, wanted = [1, 2, 3, 4], [7, None, 0, 20]
    together = logprobs_of(xp, logits, tokens, wanted)
    for index in range(4):
        if wanted[index] is not None:
            alone = logprobs_of(xp, logits[index : index + 1], [tokens[index]], [wanted[index]])
            assert together[index] == alone[0]


@both_modules
def test_a_small_vocabulary_and_tokens_that_the_model_rules_out(xp: Any) -> None:
    logits = np.array([[0.0, -np.inf, 1.0]], dtype=np.float32)
    [entry] = logprobs_of(xp, logits, [1], [20])
    assert entry is not None
    assert entry.logprob == -np.inf
    assert [token for token, _ in entry.top] == [2, 0, 1]


@both_modules
def test_large_logits_do_not_overflow(xp: Any) -> None:
    [entry] = logprobs_of(xp, np.array([[1e38, 0.0, -1e38]], dtype=np.float32), [0], [1])
    assert entry == TokenLogprobs(0.0, ((0, 0.0),))

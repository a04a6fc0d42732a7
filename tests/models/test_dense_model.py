"""`DenseModel` decodes a changing batch as each sequence would decode alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny import VOCAB, loaded_tiny

from mlxcel_paged.models.dense_model import DenseModel
from mlxcel_paged.models.loader import LoadedModel


class Alone:
    """One sequence in the model's own cache, fed token by token."""

    def __init__(self, loaded: LoadedModel, prompt: list[int]) -> None:
        self.model, self.cache = loaded.model, make_prompt_cache(loaded.model)
        if len(prompt) > 1:
            loaded.model(mx.array([prompt[:-1]]), cache=self.cache)

    def decode(self, token: int) -> mx.array:
        return self.model(mx.array([[token]]), cache=self.cache)[0, -1]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_sequences_that_join_leave_and_reorder(family: str) -> None:
    loaded = loaded_tiny(family)
    dense = DenseModel(loaded)
    random = np.random.default_rng(5)
    alone: dict[str, Alone] = {}

    def add(name: str, num_tokens: int) -> None:
        prompt = random.integers(0, VOCAB, num_tokens).tolist()
        alone[name] = Alone(loaded, prompt)
        middle = num_tokens // 2
        for start, end in ((0, middle), (middle, num_tokens - 1)):
            if end > start:
                dense.prefill(name, prompt[start:end], start)

    def step(*names: str) -> None:
        tokens = random.integers(0, VOCAB, len(names)).tolist()
        logits = dense.decode(names, tokens)
        assert logits.shape == (len(names), VOCAB)
        for row, (name, token) in enumerate(zip(names, tokens, strict=True)):
            expected = alone[name].decode(token)
            assert float(mx.abs(logits[row] - expected).max()) <= 1e-4 * float(mx.abs(expected).max())

    add("a", 31)
    step("a")
    add("b", 5)
    step("a", "b")
    add("c", 1)
    add("d", 44)
    step("a", "b", "c", "d")
    step("d", "b", "a", "c")
    dense.release("b")
    step("d", "c", "a")
    step("a")
    step("a", "c", "d")
    for name in ("a", "c", "d", "d"):
        dense.release(name)
    assert dense.nbytes == 0


def test_a_decoding_sequence_cannot_prefill() -> None:
    dense = DenseModel(loaded_tiny("llama"))
    dense.prefill("a", [1, 2, 3], 0)
    dense.prefill("b", [1, 2], 0)
    dense.decode(["a", "b"], [4, 5])
    with pytest.raises(ValueError, match="'a'"):
        dense.prefill("a", [1], 4)


def test_adopted_caches_decode() -> None:
    loaded = loaded_tiny("llama")
    caches = make_prompt_cache(loaded.model)
    loaded.model(mx.array([[7, 8, 9]]), cache=caches)
    alone = Alone(loaded, [7, 8, 9, 0])
    dense = DenseModel(loaded)
    dense.adopt("x", caches)
    assert mx.allclose(dense.decode(["x"], [11])[0], alone.decode(11), rtol=1e-5, atol=1e-5)

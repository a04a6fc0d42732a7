"""Every family gives on pages, in a ragged batch, the logits that each sequence gets alone in the model's own cache."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny import FAMILIES, VARIANTS, VOCAB, loaded_tiny

from mlxcel_paged.models.loader import LoadedModel
from mlxcel_paged.models.paged_model import PagedModel
from mlxcel_paged.models.paged_rows import PagedRows

PROMPTS = (41, 7, 1)
NUM_STEPS = 20
# A page size per way to run: fused kernel, gather over in-place writes, gather over MLX's own scatter.
WAYS = {"fused": 8, "gather": 16, "scatter": 16}


def stock_logits(loaded: LoadedModel, prompt: list[int], following: list[int]) -> list[mx.array]:
    caches = make_prompt_cache(loaded.model)
    if len(prompt) > 1:
        loaded.model(mx.array([prompt[:-1]]), cache=caches)
    return [loaded.model(mx.array([[token]]), cache=caches)[0, -1] for token in (prompt[-1], *following)]


def paged_model(loaded: LoadedModel, way: str, **options: int) -> PagedModel:
    if way == "scatter":
        loaded = dataclasses.replace(loaded, device="gpu")
    sizes = {"num_pages": 40, "max_slots": 3, "max_context": 128, **options}
    return PagedModel(loaded, page_size=WAYS[way], arm="fused" if way == "fused" else "gather", **sizes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_ragged_batch(family: str, way: str) -> None:
    loaded = loaded_tiny(family)
    random = np.random.default_rng(11)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in PROMPTS]
    following = random.integers(0, VOCAB, (NUM_STEPS, len(prompts)))
    expected = [stock_logits(loaded, prompt, following[:, row].tolist()) for row, prompt in enumerate(prompts)]
    paged = paged_model(loaded, way)
    rows = PagedRows(paged)
    for prompt in prompts:
        rows.add(prompt, chunk=13)
    steps = [[prompt[-1] for prompt in prompts], *following.tolist()]
    for step, tokens in enumerate(steps):
        logits = rows.decode(tokens)
        assert logits.dtype == mx.float32
        for row in range(len(prompts)):
            want = expected[row][step]
            assert float(mx.abs(logits[row] - want).max()) <= 2e-4 * float(mx.abs(want).max()), (step, row)
    launches = paged.outcomes.snapshot()
    assert len(launches) == 1
    assert next(iter(launches)) == {"fused": "fused"}.get(way, "gather:forced")
    rows.close()
    assert [pool.num_used for pool in paged.page_pools] == [0] * len(paged.page_pools)

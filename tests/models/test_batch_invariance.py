"""On the CPU a decode step gives a sequence the same bits whatever its neighbours are."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_paged.models.loader import LoadedModel, load_model
from mlxcel_paged.models.paged_model import PagedModel
from mlxcel_paged.models.paged_rows import PagedRows

pytestmark = pytest.mark.model

# Shorter than a page, across several pages, and longer than a chunk of the plan: rows with and without a split.
PROMPT_LENGTHS = (5, 150, 700)
NUM_STEPS = 3


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("embedded", device="cpu")


def _logits(loaded: LoadedModel, prompts: list[list[int]]) -> list[np.ndarray]:
    """Float32 logits of `NUM_STEPS` decode steps over `prompts` as one batch, `[rows, vocab]` each."""
    paged = PagedModel(loaded, num_pages=64, page_size=32, max_slots=4, max_context=1024)
    rows = PagedRows(paged)
    for prompt in prompts:
        rows.add(prompt)
    steps = []
    for step in range(NUM_STEPS):
        logits = rows.decode([prompt[-1 - step] for prompt in prompts])
        mx.eval(logits)
        steps.append(np.array(logits))
    return steps


def test_logits_have_the_same_bits_alone_and_in_a_batch(loaded: LoadedModel) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 40_000, length).tolist() for length in PROMPT_LENGTHS]
    together = _logits(loaded, prompts)
    for row, prompt in enumerate(prompts):
        for step, alone in enumerate(_logits(loaded, [prompt])):
            assert np.array_equal(alone[0], together[step][row]), (row, step)

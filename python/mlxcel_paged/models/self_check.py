"""Compares paged decode with the model's own cache before a model is served on pages."""

from __future__ import annotations

import random
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxcel_paged.attention.dispatch import Arm
from mlxcel_paged.errors import SelfCheckError, UnsupportedModelError
from mlxcel_paged.kvcache.layout import KVLayout
from mlxcel_paged.models.kv_groups import kv_layout
from mlxcel_paged.models.loader import LoadedModel
from mlxcel_paged.models.paged_model import PagedModel
from mlxcel_paged.models.paged_rows import PagedRows

# Largest logit difference allowed, relative to the largest logit of the step. Both sides round differently: on the CPU
# in float32 a few 1e-6 is usual, in 16 bit about ten units in the last place; a wrong page, mask or position is above
# 0.1.
TOLERANCES = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 8e-2}
_NUM_STEPS = 3
_MAX_PROMPT_TOKENS = 48
_SEED = 20


@dataclass(frozen=True, slots=True)
class SelfCheckReport:
    """What the check saw.

    Attributes:
        largest_difference: Largest logit difference, relative to the largest logit of its step.
        tolerance: What would have been too much.
        outcomes: Launches by outcome, so that the caller sees which path was checked.
    """

    largest_difference: float
    tolerance: float
    outcomes: dict[str, int]


def self_check(
    loaded: LoadedModel,
    *,
    page_size: int,
    arm: Arm = "auto",
    layout: KVLayout | None = None,
    max_slots: int = 2,
    max_context: int = 0,
) -> SelfCheckReport:
    """Decodes two short sequences of different lengths on pages and alone, and compares logit by logit.

    Pools, plans and counters are the check's own; nothing of it stays.

    Args:
        max_slots, max_context: Those that the model will be served with: its launches are then the very same.

    Raises:
        SelfCheckError: The difference is above the tolerance of the model's dtype, or is not a number.
        UnsupportedModelError: The model cannot be paged.
    """
    layout = layout or kv_layout(loaded.model)
    lengths = (min(page_size + 3, _MAX_PROMPT_TOKENS), 5)
    pages_per_sequence = -(-(max(lengths) + _NUM_STEPS) // page_size)
    source = random.Random(_SEED)
    sequences = [[source.randrange(loaded.vocab_size) for _ in range(length + _NUM_STEPS)] for length in lengths]
    expected = [_own_cache_logits(loaded, tokens, length) for tokens, length in zip(sequences, lengths, strict=True)]
    # A paged model turns layers of the model to our kernels, so what these compute has to be there before.
    paged = PagedModel(
        loaded,
        num_pages=2 * pages_per_sequence,
        page_size=page_size,
        max_slots=max(2, max_slots),
        max_context=max(max_context, pages_per_sequence * page_size),
        arm=arm,
        layout=layout,
    )
    try:
        found = _paged_logits(paged, sequences, lengths)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise SelfCheckError(f"paged decode of {loaded.name} failed: {type(error).__name__}: {error}") from error
    tolerance = TOLERANCES.get(loaded.dtype, max(TOLERANCES.values()))
    largest = 0.0
    for step in range(_NUM_STEPS):
        for row in range(len(lengths)):
            want, got = expected[row][step], found[step][row]
            difference = float(mx.abs(want - got).max()) / max(float(mx.abs(want).max()), 1e-6)
            if not difference <= tolerance:
                raise SelfCheckError(
                    f"paged decode of {loaded.name} differs from the model's own cache at step {step}, row {row}:"
                    f" largest relative logit difference {difference:.3g}, tolerance {tolerance:.3g}"
                    " (hint: --decode-storage dense)"
                )
            largest = max(largest, difference)
    return SelfCheckReport(largest, tolerance, paged.outcomes.snapshot())


def _own_cache_logits(loaded: LoadedModel, tokens: list[int], length: int) -> list[mx.array]:
    caches = make_prompt_cache(loaded.model)
    loaded.model(mx.array(tokens[: length - 1], mx.int32)[None], cache=caches)
    logits = []
    for step in range(_NUM_STEPS):
        token = mx.array([[tokens[length - 1 + step]]], mx.int32)
        logits.append(loaded.model(token, cache=caches)[0, -1].astype(mx.float32))
        mx.eval(logits[-1])
    return logits


def _paged_logits(paged: PagedModel, sequences: list[list[int]], lengths: tuple[int, ...]) -> list[mx.array]:
    rows = PagedRows(paged)
    for tokens, length in zip(sequences, lengths, strict=True):
        rows.add(tokens[:length])
    logits = []
    for step in range(_NUM_STEPS):
        logits.append(
            rows.decode([tokens[length - 1 + step] for tokens, length in zip(sequences, lengths, strict=True)])
        )
        mx.eval(logits[-1])
    return logits

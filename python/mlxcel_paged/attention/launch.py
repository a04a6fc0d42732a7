"""The door from a model's attention call to the step that its handles belong to."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxcel_paged.errors import UnsupportedModelError
from mlxcel_paged.kvcache.handle import KeyHandle


def attend(
    queries: mx.array,
    keys: KeyHandle,
    values: Any,
    *,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
    logits_soft_cap: float = 0.0,
) -> mx.array:
    """Launches attention on a handle.

    Raises:
        UnsupportedModelError: Keys and values come from different updates, or the model made a mask of its own.
    """
    if values is not keys.values:
        raise UnsupportedModelError("the model calls attention with keys and values of different cache updates")
    if mask is not None:
        raise UnsupportedModelError("the model calls attention with a mask of its own, which pages cannot honour")
    return keys.step.attend(keys, queries, scale=scale, sinks=sinks, logits_soft_cap=logits_soft_cap)

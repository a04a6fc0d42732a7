"""The door from a model's attention call to the step that its handles belong to."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxcel_paged.errors import UnsupportedModelError
from mlxcel_paged.kvcache.handle import KeyHandle
from mlxcel_paged.kvcache.rotation import Unrotated


def attend(
    queries: mx.array | Unrotated,
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
        UnsupportedModelError: Keys and values come from different updates, the model made a mask of its own, or
            queries and keys await different rotations.
    """
    if values is not keys.values:
        raise UnsupportedModelError("the model calls attention with keys and values of different cache updates")
    if mask is not None:
        raise UnsupportedModelError("the model calls attention with a mask of its own, which pages cannot honour")
    plain = keys.plain_queries(queries)
    return keys.step.attend(keys, plain, scale=scale, sinks=sinks, logits_soft_cap=logits_soft_cap)

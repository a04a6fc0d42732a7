"""What one forward pass is to the layers' caches."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from mlxcel_paged.kvcache.handle import KeyHandle


class Step(Protocol):
    """One forward pass over paged KV: decode rows, a chunk of a prompt, or a probe of the model's shapes."""

    @property
    def offset(self) -> int | mx.array:
        """Absolute position of the first new token: an int, or `[batch]` int32."""

    def attend(
        self,
        handle: KeyHandle,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        logits_soft_cap: float,
    ) -> mx.array:
        """Writes the handle's new tokens once, and attends; `queries` and the result are `[batch, heads, tokens, dim]`.
        RoPE that the handle awaits is applied first, to the queries too."""

"""One decode call whose arguments are checked."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """One decode attention over checked arguments.

    Attributes:
        q: `[batch, num_qo_heads, head_dim]`.
        k_pages, v_pages: Pools in `layout`.
        window: Visible tokens at most; None for all.
        row_by_row: Compute every row alone, so that its bits do not depend on the others (gather only).
    """

    q: mx.array
    k_pages: mx.array
    v_pages: mx.array
    layout: str
    sm_scale: float
    window: int | None
    logits_soft_cap: float
    sinks: mx.array | None
    return_lse: bool
    row_by_row: bool = False

    @property
    def page_size(self) -> int:
        return int(self.k_pages.shape[1 if self.layout == "NHD" else 2])


Result = tuple[mx.array, mx.array | None]

"""A paged cache with poison around its tokens, and attention in float64 that indexes the pages itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxcel_paged import _core

Array = np.ndarray[Any, Any]


@dataclass
class PagedCase:
    """Rows of random tokens in shuffled pages; `k` and `v` are pools in `layout`."""

    lengths: list[int]
    num_kv_heads: int = 2
    group_size: int = 3
    head_dim: int = 64
    page_size: int = 8
    layout: str = "HND"
    dtype: type[np.floating[Any]] = np.float32
    window: int | None = None
    seed: int = 0
    q: Array = field(init=False)
    k: Array = field(init=False)
    v: Array = field(init=False)
    page_ids: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        num_pages = [-(-length // self.page_size) for length in self.lengths]
        ids = rng.permutation(sum(num_pages) + 2).tolist()
        self.page_ids = [[ids.pop() for _ in range(n)] for n in num_pages]
        self.q = rng.standard_normal((len(self.lengths), self.num_qo_heads, self.head_dim)).astype(self.dtype)
        tokens = (sum(num_pages) + 2, self.num_kv_heads, self.page_size, self.head_dim)
        self.k, self.v = np.full(tokens, np.nan, self.dtype), np.full(tokens, np.nan, self.dtype)
        for row, length in enumerate(self.lengths):
            for token in range(length):
                page, entry = self.place(row, token)
                self.k[page, :, entry] = rng.standard_normal((self.num_kv_heads, self.head_dim))
                self.v[page, :, entry] = rng.standard_normal((self.num_kv_heads, self.head_dim))
        if self.layout == "NHD":
            self.k = np.ascontiguousarray(self.k.swapaxes(1, 2))
            self.v = np.ascontiguousarray(self.v.swapaxes(1, 2))

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def sm_scale(self) -> float:
        return float(self.head_dim) ** -0.5

    def place(self, row: int, token: int) -> tuple[int, int]:
        return self.page_ids[row][token // self.page_size], token % self.page_size

    def plan(self, **options: Any) -> _core.DecodePlan:
        plan = _core.DecodePlan(
            max_slots=max(len(self.lengths), 1),
            max_pages_per_slot=64,
            num_pages=self.k.shape[0],
            page_size=self.page_size,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            **options,
        )
        for pages, length in zip(self.page_ids, self.lengths, strict=True):
            plan.admit(pages, length)
        return plan

    def tokens(self, pool: Array, row: int, length: int) -> Array:
        """`[length, num_kv_heads, head_dim]` in float64."""
        if self.layout == "NHD":
            pool = pool.swapaxes(1, 2)
        places = [self.place(row, token) for token in range(length)]
        return np.array([pool[page, :, entry] for page, entry in places], np.float64).reshape(
            length, self.num_kv_heads, self.head_dim
        )

    def attend(self, q: Array, row: int, length: int, sinks: Array | None = None) -> tuple[Array, Array]:
        """Output and base-2 LSE of one query `[num_qo_heads, head_dim]` over the row's first `length` tokens."""
        first = max(0, length - self.window) if self.window else 0
        k = np.repeat(self.tokens(self.k, row, length)[first:], self.group_size, axis=1)
        v = np.repeat(self.tokens(self.v, row, length)[first:], self.group_size, axis=1)
        logits = np.einsum("hd,thd->ht", q.astype(np.float64), k) * self.sm_scale
        extra = np.full((self.num_qo_heads, 1), -np.inf) if sinks is None else sinks[:, None].astype(np.float64)
        top = np.max(np.concatenate([logits, extra], axis=1), axis=1, keepdims=True)
        top = np.where(np.isinf(top), 0.0, top)
        weights = np.exp(logits - top)
        total = weights.sum(axis=1, keepdims=True) + np.exp(extra - top)
        out = np.einsum("ht,thd->hd", weights, v) / np.where(total == 0, 1.0, total)
        with np.errstate(divide="ignore"):
            return out, (top + np.log(total))[:, 0] / np.log(2.0)

    def expected(self, sinks: Array | None = None) -> tuple[Array, Array]:
        rows = [self.attend(q, row, self.lengths[row], sinks) for row, q in enumerate(self.q)]
        return np.array([out for out, _ in rows]), np.array([lse for _, lse in rows])

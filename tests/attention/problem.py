"""Random decode problems over shuffled pages in which every byte that no visible token owns is poisoned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_paged.attention.reference import reference_decode

OUT_TOLERANCE = {mx.float32: 2e-5, mx.float16: 1.5e-3, mx.bfloat16: 1.5 * 2**-8}
POISONS = {"nan": math.nan, "inf": math.inf, "largest": 65504.0}


@dataclass
class Problem:
    """Arguments of one `paged_decode` call and what it must give."""

    q: mx.array
    k_pages: mx.array
    v_pages: mx.array
    arguments: dict[str, Any]
    out: np.ndarray[Any, Any]
    lse: np.ndarray[Any, Any]

    def check(self, out: mx.array, lse: mx.array | None) -> None:
        """Compares with the float64 oracle within the decode contract's tolerances."""
        dtype = self.q.dtype
        assert out.dtype == dtype
        found = np.array(out.astype(mx.float32), np.float64)
        assert found.shape == self.out.shape
        assert np.isfinite(found).all()
        row_max = np.abs(self.out).max(axis=-1, keepdims=True)
        assert (np.abs(found - self.out) <= OUT_TOLERANCE[dtype] * row_max + 1e-30).all(), (
            np.abs(found - self.out).max() / row_max.max()
        )
        if lse is not None:
            assert lse.dtype == mx.float32
            got = np.array(lse, np.float64)
            assert ((got == -math.inf) == (self.lse == -math.inf)).all()
            finite = np.isfinite(self.lse)
            bound = (1e-5 + 4e-7 * np.abs(self.lse[finite])) * (1 if dtype == mx.float32 else 4)
            assert (np.abs(got[finite] - self.lse[finite]) <= bound).all(), np.abs(got[finite] - self.lse[finite]).max()


def make_problem(
    *,
    lengths: Sequence[int],
    num_kv_heads: int = 2,
    group_size: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: mx.Dtype = mx.float32,
    layout: str = "NHD",
    offset: bool = False,
    window: int | None = None,
    logits_soft_cap: float = 0.0,
    sinks: bool = False,
    poison: str = "nan",
    seed: int = 0,
    scale_keys: float = 1.0,
) -> Problem:
    """Draws a problem; with `offset`, rows of more than one token begin in the middle of their first page."""
    random = np.random.default_rng(seed)
    batch, num_qo_heads = len(lengths), num_kv_heads * group_size
    firsts = [int(random.integers(1, page_size)) if offset and length else 0 for length in lengths]
    counts = [-(-(first + length) // page_size) if length else 0 for first, length in zip(firsts, lengths, strict=True)]
    num_pages = sum(counts) + 3
    order = random.permutation(num_pages)[: sum(counts)]
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    indices = np.concatenate([order, [2**31 - 1]]).astype(np.int32)  # the tail is never read
    last = [
        (first + length - 1) % page_size + 1 if length else 0 for first, length in zip(firsts, lengths, strict=True)
    ]
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    k, v = np.full(shape, POISONS[poison], np.float32), np.full(shape, POISONS[poison], np.float32)
    for row, (length, first) in enumerate(zip(lengths, firsts, strict=True)):
        begin = 0 if window is None else max(0, length - window)
        for token in range(begin, length):
            page, slot = indices[indptr[row] + (first + token) // page_size], (first + token) % page_size
            k[page, slot] = random.standard_normal((num_kv_heads, head_dim)) * scale_keys
            v[page, slot] = random.standard_normal((num_kv_heads, head_dim)) + np.arange(num_kv_heads)[:, None]
    q = mx.array(random.standard_normal((batch, num_qo_heads, head_dim)).astype(np.float32)).astype(dtype)
    k_pages, v_pages = mx.array(k).astype(dtype), mx.array(v).astype(dtype)
    sink_values = mx.array(random.standard_normal(num_qo_heads).astype(np.float32) * 2) if sinks else None
    arguments: dict[str, Any] = {
        "indptr": indptr,
        "indices": indices,
        "last_page_len": np.array(last, np.int32),
        "first_page_offset": np.array(firsts, np.int32) if offset else None,
        "window": window,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sink_values,
        "layout": layout,
    }
    out, lse = reference_decode(
        _float64(q),
        _float64(k_pages),
        _float64(v_pages),
        indptr=indptr,
        indices=indices,
        last_page_len=np.array(last),
        first_page_offset=np.array(firsts),
        sm_scale=head_dim**-0.5,
        window=window,
        logits_soft_cap=logits_soft_cap,
        sinks=None if sink_values is None else _float64(sink_values),
        layout="NHD",
    )
    if layout == "HND":
        k_pages, v_pages = (mx.contiguous(pool.swapaxes(1, 2)) for pool in (k_pages, v_pages))
    return Problem(q, k_pages, v_pages, arguments, out, lse)


def _float64(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32)).astype(np.float64)

"""Attention of the models that cap their logits by hand instead of calling mlx-lm's shared function.

Gemma 2 computes `cap * tanh(logits / cap)` on raw keys, so its attention module gets a paged branch; without a handle
the original runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlxcel_paged.attention.launch import attend
from mlxcel_paged.kvcache.layer_cache import PagedLayerCache

_MODULE = "mlx_lm.models.gemma2"
_originals: dict[type, Callable[..., mx.array]] = {}


def install() -> None:
    """Adapts `mlx_lm.models.gemma2` if it is loaded. Idempotent."""
    module = sys.modules.get(_MODULE)
    if module is None or module.Attention in _originals:
        return
    original = module.Attention.__call__
    _originals[module.Attention] = original

    def call(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if isinstance(cache, PagedLayerCache):
            return _paged_call(self, x, mask, cache)
        output: mx.array = original(self, x, mask, cache)
        return output

    module.Attention.__call__ = call


def uninstall() -> None:
    """Undoes `install`."""
    for attention, original in _originals.items():
        attention.__call__ = original  # type: ignore[method-assign]
    _originals.clear()


def _paged_call(attention: Any, x: mx.array, mask: mx.array | None, cache: PagedLayerCache) -> mx.array:
    batch, num_tokens, _ = x.shape

    def heads(projected: mx.array, num_heads: int) -> mx.array:
        return projected.reshape(batch, num_tokens, num_heads, attention.head_dim).transpose(0, 2, 1, 3)

    queries = attention.rope(heads(attention.q_proj(x), attention.n_heads), offset=cache.offset)
    keys = attention.rope(heads(attention.k_proj(x), attention.n_kv_heads), offset=cache.offset)
    handles = cache.update_and_fetch(keys, heads(attention.v_proj(x), attention.n_kv_heads))
    output = attend(
        queries,
        *handles,
        scale=attention.scale,
        mask=mask,
        logits_soft_cap=attention.attn_logit_softcapping,
    )
    projected: mx.array = attention.o_proj(output.transpose(0, 2, 1, 3).reshape(batch, num_tokens, -1))
    return projected

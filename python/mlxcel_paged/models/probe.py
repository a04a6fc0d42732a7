"""Learns the attention shapes of a model by building, not evaluating, its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlxcel_paged.errors import UnsupportedModelError
from mlxcel_paged.kvcache.handle import KeyHandle
from mlxcel_paged.kvcache.layer_cache import PagedLayerCache
from mlxcel_paged.models.decode_trace import call_with_caches


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer's attention is called with."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: mx.Dtype
    uses_sinks: bool
    logits_soft_cap: float


class _ProbeStep:
    """Records every launch; the output has the right shape and is never evaluated."""

    def __init__(self, offset: int | mx.array) -> None:
        self.offset = offset
        self.launches: dict[int, LayerShape] = {}

    def attend(
        self,
        handle: KeyHandle,
        queries: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        logits_soft_cap: float,
    ) -> mx.array:
        shape = _shape(handle, queries, sinks, logits_soft_cap)
        if self.launches.setdefault(handle.layer, shape) != shape:
            raise UnsupportedModelError(
                f"layers that share the KV of layer {handle.layer} attend with different shapes"
            )
        return queries


class _ProbeCache(PagedLayerCache):
    """Checks the masks that the model asks for: pages mask what the layer's own cache keeps, and nothing else."""

    __slots__ = ("_window",)

    def __init__(self, layer: int, step: _ProbeStep, window: int | None) -> None:
        super().__init__(layer, step)
        self._window = window

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> None:
        if window_size is not None and window_size != self._window:
            kept = "all tokens" if self._window is None else f"{self._window} tokens"
            raise UnsupportedModelError(
                f"layer {self.layer} masks a window of {window_size} tokens over a cache that keeps {kept}"
            )


def probe_layers(model: nn.Module, windows: Sequence[int | None]) -> list[LayerShape]:
    """Returns the attention shape of each of the model's caches, in order.

    Both kinds of pass are built: a prompt chunk (one sequence, several tokens) and a decode step (several sequences
    with offsets of their own).

    Args:
        windows: Of every cache, the tokens that it keeps; None for all.

    Raises:
        UnsupportedModelError: The model bypasses the hook or needs something that pages cannot give.
    """
    num_caches = len(windows)
    prompt, decode = _ProbeStep(3), _ProbeStep(mx.array([3, 5], mx.int32))
    for step, tokens in ((prompt, mx.zeros((1, 2), mx.int32)), (decode, mx.zeros((2, 1), mx.int32))):
        try:
            caches = [_ProbeCache(layer, step, window) for layer, window in enumerate(windows)]
            call_with_caches(model, caches, tokens)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"the model cannot run on paged KV: {type(error).__name__}: {error} (hint: --decode-storage dense)"
            ) from error
    missing = [layer for layer in range(num_caches) if layer not in decode.launches or layer not in prompt.launches]
    if missing:
        raise UnsupportedModelError(f"layers {missing} never call mlx-lm's attention, so they cannot be paged")
    return [decode.launches[layer] for layer in range(num_caches)]


def _shape(handle: KeyHandle, queries: mx.array, sinks: mx.array | None, logits_soft_cap: float) -> LayerShape:
    layer, keys, values = handle.layer, handle.k_new, handle.v_new
    if keys.shape != values.shape:
        raise UnsupportedModelError(
            f"layer {layer} has keys {keys.shape} and values {values.shape} of different shapes"
        )
    if not queries.dtype == keys.dtype == values.dtype:
        raise UnsupportedModelError(
            f"layer {layer} attends with mixed dtypes: {queries.dtype}, {keys.dtype}, {values.dtype}"
        )
    num_qo_heads, num_kv_heads, head_dim = queries.shape[1], keys.shape[1], keys.shape[3]
    if queries.shape[3] != head_dim or num_qo_heads % num_kv_heads:
        raise UnsupportedModelError(f"layer {layer} has queries {queries.shape} that do not fit its keys {keys.shape}")
    return LayerShape(num_qo_heads, num_kv_heads, head_dim, keys.dtype, sinks is not None, logits_soft_cap)

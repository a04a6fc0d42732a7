"""The cache object that a layer of an mlx-lm model is called with."""

from __future__ import annotations

import mlx.core as mx

from mlxcel_paged.kvcache.handle import KeyHandle, ValueHandle
from mlxcel_paged.kvcache.rotation import Unrotated
from mlxcel_paged.kvcache.step import Step


class PagedLayerCache:
    """Answers mlx-lm's cache verbs for one layer, on top of the pages of the current step.

    It holds no tokens: keys and values go to the layer's pools when attention launches. Masks are the launch's
    business, so `make_mask` returns None.
    """

    __slots__ = ("_handles", "_step", "layer")

    def __init__(self, layer: int, step: Step) -> None:
        self.layer = layer
        self._step = step
        self._handles: tuple[KeyHandle, ValueHandle] | None = None

    @property
    def offset(self) -> int | mx.array:
        """Absolute position of the first new token."""
        return self._step.offset

    def update_and_fetch(self, keys: mx.array | Unrotated, values: mx.array) -> tuple[KeyHandle, ValueHandle]:
        """Takes the new tokens and returns the handles that attention is to be called with."""
        handle = KeyHandle(self.layer, self._step, keys, values)
        self._handles = (handle, handle.values)
        return self._handles

    def keys_and_values(self) -> tuple[KeyHandle, ValueHandle]:
        """Returns the handles of this pass's update, for the layers that share this layer's KV."""
        if self._handles is None:
            raise RuntimeError(f"layer cache {self.layer} was read before it was written in this pass")
        return self._handles

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> None:
        return None

    def size(self) -> int:
        return 0

    def empty(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        """0: the pools own the memory."""
        return 0

    def is_trimmable(self) -> bool:
        return False

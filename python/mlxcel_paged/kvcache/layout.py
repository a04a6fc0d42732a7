"""Which layers share a page table: the KV groups of a model.

Layers with the same window, heads and head dimension read the same page ids, so a step needs one table and one plan per
group.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share page ids.

    Attributes:
        index: Place in `KVLayout.groups`.
        layer_ids: Indices of the layers' caches.
        window: Visible tokens, the current one included; None without a window.
        uses_sinks: Some layer adds attention sinks.
        logits_soft_cap: Cap on the logits; 0 for none.
    """

    index: int
    layer_ids: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    uses_sinks: bool
    logits_soft_cap: float

    def page_bytes(self, page_size: int, bytes_per_element: int) -> int:
        """Bytes of one page over all layers of the group, keys and values."""
        return 2 * len(self.layer_ids) * self.num_kv_heads * self.head_dim * page_size * bytes_per_element


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV groups of a model, and the group of every layer.

    Attributes:
        dtype: Dtype in which the model hands over keys and values.
    """

    groups: tuple[KVGroup, ...]
    group_of_layer: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def num_layers(self) -> int:
        """Layers that own KV; layers that share another's are not counted."""
        return len(self.group_of_layer)

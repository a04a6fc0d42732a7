"""Finds the KV groups of a model: windows from the caches that it asks for, shapes from a probe of its forward pass."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlxcel_paged.errors import UnsupportedModelError
from mlxcel_paged.kvcache.layout import KVGroup, KVLayout
from mlxcel_paged.models.probe import LayerShape, probe_layers


def kv_layout(model: nn.Module) -> KVLayout:
    """Finds the KV groups of `model`. Builds its graph twice, evaluates nothing.

    Raises:
        UnsupportedModelError: Some layer cannot be paged; the message says which and why.
    """
    windows = [_window(layer, cache) for layer, cache in enumerate(make_prompt_cache(model))]
    shapes = probe_layers(model, windows)
    dtypes = {shape.dtype for shape in shapes}
    if len(dtypes) != 1:
        raise UnsupportedModelError(
            f"layers hand over keys of different dtypes: {', '.join(map(str, sorted(dtypes, key=str)))}"
        )
    members: dict[tuple[int | None, int, int, int], list[int]] = {}
    for layer, (window, shape) in enumerate(zip(windows, shapes, strict=True)):
        members.setdefault((window, shape.num_kv_heads, shape.head_dim, shape.num_qo_heads), []).append(layer)
    groups = tuple(
        _group(index, layers, window, [shapes[layer] for layer in layers])
        for index, ((window, *_), layers) in enumerate(members.items())
    )
    group_of_layer = [0] * len(windows)
    for group in groups:
        for layer in group.layer_ids:
            group_of_layer[layer] = group.index
    return KVLayout(groups, tuple(group_of_layer), dtypes.pop())


def _window(layer: int, cache: Any) -> int | None:
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return int(cache.max_size)
    kept = f" with keep={cache.keep}" if isinstance(cache, RotatingKVCache) else ""
    raise UnsupportedModelError(
        f"layer {layer} keeps its state in a {type(cache).__name__}{kept}, which cannot be paged"
    )


def _group(index: int, layers: list[int], window: int | None, shapes: list[LayerShape]) -> KVGroup:
    caps = {shape.logits_soft_cap for shape in shapes}
    return KVGroup(
        index=index,
        layer_ids=tuple(layers),
        num_qo_heads=shapes[0].num_qo_heads,
        num_kv_heads=shapes[0].num_kv_heads,
        head_dim=shapes[0].head_dim,
        window=window,
        uses_sinks=any(shape.uses_sinks for shape in shapes),
        logits_soft_cap=max(caps),
    )

"""The same random KV in pages and in mlx-lm's caches, so that decode steps can be timed without a prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxcel_paged.errors import UnsupportedModelError


class SyntheticKV:
    """Random keys and values, `[batch, num_kv_heads, context, head_dim]`, which all layers share.

    Args:
        loaded: The model; all its layers must attend to everything (one KV group without a window).
        batch: Sequences.
        context: Tokens of each.

    Raises:
        UnsupportedModelError: The model has windows or several KV groups.
    """

    def __init__(self, loaded: Any, *, batch: int, context: int) -> None:
        from mlxcel_paged.models.kv_groups import kv_layout

        self.layout = kv_layout(loaded.model)
        if len(self.layout.groups) != 1 or self.layout.groups[0].window is not None:
            raise UnsupportedModelError("synthetic KV needs a model whose layers all attend to the whole context")
        group = self.layout.groups[0]
        self.batch, self.context = batch, context
        rng = np.random.default_rng(0)
        shape = (batch, group.num_kv_heads, context, group.head_dim)
        self.keys = rng.standard_normal(shape, np.float32)
        self.values = rng.standard_normal(shape, np.float32)


@dataclass(frozen=True, slots=True)
class DecodeArm:
    """One storage arm that can run decode steps.

    Attributes:
        decode: The newest token of every row to float32 logits, `[batch, vocab]`, evaluated when read.
        outcomes: Launches so far by outcome.
    """

    decode: Callable[[list[int]], Any]
    outcomes: Callable[[], dict[str, int]]


def dense_arm(loaded: Any, kv: SyntheticKV) -> DecodeArm:
    """Puts `kv` into mlx-lm's own caches."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from mlxcel_paged.models.dense_model import DenseModel

    model = DenseModel(loaded)
    sequences = list(range(kv.batch))
    num_steps = 0
    for row in sequences:
        caches = make_prompt_cache(loaded.model)
        keys, values = (mx.array(part[row : row + 1]).astype(kv.layout.dtype) for part in (kv.keys, kv.values))
        for cache in caches:
            cache.update_and_fetch(keys, values)
        model.adopt(row, caches)

    def decode(tokens: list[int]) -> Any:
        nonlocal num_steps
        num_steps += 1
        return model.decode(sequences, tokens)

    return DecodeArm(decode, lambda: {"dense": num_steps * kv.layout.num_layers})


def paged_arm(loaded: Any, kv: SyntheticKV, *, arm: Any, page_size: int, max_context: int) -> DecodeArm:
    """Puts `kv` into pages; `arm` is `fused` or `gather`."""
    from mlxcel_paged.models.paged_model import PagedModel
    from mlxcel_paged.models.paged_rows import PagedRows

    model = PagedModel(
        loaded,
        num_pages=kv.batch * -(-max_context // page_size),
        page_size=page_size,
        max_slots=kv.batch,
        max_context=max_context,
        arm=arm,
        layout=kv.layout,
    )
    rows = PagedRows(model)
    for _ in range(kv.batch):
        rows.add_synthetic(kv.context)
    csr = model.plans[0].export_csr()
    indptr, indices = np.asarray(csr.indptr), np.asarray(csr.indices)
    for layer in range(kv.layout.num_layers):
        for pool, part in ((model.pools.k(layer), kv.keys), (model.pools.v(layer), kv.values)):
            for row in range(kv.batch):
                _fill(np.array(pool, copy=False), indices[indptr[row] : indptr[row + 1]], part[row])
    return DecodeArm(rows.decode, model.outcomes.snapshot)


def _fill(pool: np.ndarray[Any, Any], pages: np.ndarray[Any, Any], part: np.ndarray[Any, Any]) -> None:
    """Writes `part` (`[num_kv_heads, context, head_dim]`) into `pages` of an HND pool, in place."""
    num_kv_heads, context, head_dim = part.shape
    page_size = pool.shape[2]
    padded = np.zeros((num_kv_heads, len(pages) * page_size, head_dim), part.dtype)
    padded[:, :context] = part
    pool[pages] = padded.reshape(num_kv_heads, len(pages), page_size, head_dim).transpose(1, 0, 2, 3)

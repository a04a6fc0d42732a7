"""What a step needs in memory beside weights and pages: the larger of a prompt chunk and a full decode batch.

An estimate of what MLX holds at a time while it runs one layer after another: per token the block's inputs and outputs,
queries, keys, values and attention output, and the MLP's gate, up and product. Decode adds the logits, which are
computed in the model's dtype and kept as f32. The gather arm adds one layer's keys and values of every token that the
batch may hold, laid out anew. tests/engine/test_peak_memory.py holds it against what MLX allocates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxcel_paged.kvcache.layout import KVLayout

_HIDDEN_COPIES = 8
_MLP_COPIES = 8
_HEAD_COPIES = 3


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step.

    Attributes:
        num_chunk_tokens: prompt tokens of a step at most.
        max_batch: decode rows at most.
        num_gathered_tokens: tokens that the gather arm lays out anew at most; 0 for the fused kernels.
    """

    num_chunk_tokens: int
    max_batch: int
    num_gathered_tokens: int = 0


def activation_bytes(config: Mapping[str, Any], layout: KVLayout, step: StepShape, vocab_size: int) -> int:
    """Bytes of the largest step of a model.

    Args:
        config: the model's configuration, or one with a `text_config` that is.
        layout: its KV groups.
        step: what runs at most.
        vocab_size: columns of the logits.
    """
    text = config.get("text_config") or config
    hidden = int(text.get("hidden_size") or 0)
    intermediate = int(text.get("intermediate_size") or 4 * hidden)
    item = layout.dtype.size
    heads = max((group.num_qo_heads + 2 * group.num_kv_heads) * group.head_dim for group in layout.groups)
    token = item * (_HIDDEN_COPIES * hidden + _MLP_COPIES * intermediate + _HEAD_COPIES * heads)
    kv_token = max(2 * group.num_kv_heads * group.head_dim for group in layout.groups) * item
    chunk = step.num_chunk_tokens * token
    rows = step.max_batch * (token + vocab_size * (item + 4))
    return max(chunk, rows) + step.num_gathered_tokens * kv_token

"""A model on mlx-lm's own caches: the arm without pages, for comparison and for models that cannot be paged."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlxcel_paged.models.loader import LoadedModel


class DenseModel:
    """Prefill and batched decode of one model over mlx-lm's caches, keyed by sequence.

    A sequence prefills in caches of its own and joins the batch with its first decode step; the batch's caches are
    merged, extended and filtered as mlx-lm's own batch generator does. A lone sequence stays in its own caches, which
    need no mask. Models whose caches cannot be merged decode one sequence after the other.

    Args:
        loaded: The model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._waiting: dict[Hashable, list[Any]] = {}
        self._batch: list[Any] = []
        self._rows: list[Hashable] = []
        self.is_batchable = why_one_sequence(loaded.model) is None

    def prefill(self, sequence: Hashable, tokens: Sequence[int], start: int) -> None:
        """Computes the KV of a chunk of one prompt. No logits: the prompt's last token is its first decode row.

        Args:
            sequence: The sequence's key; unknown keys begin a sequence.
            tokens: The chunk's token ids.
            start: Absolute position of the first token, which must be the number of tokens that the sequence holds.
        """
        if sequence in self._rows:
            raise ValueError(f"sequence {sequence!r} already decodes and cannot prefill")
        caches = self._waiting.get(sequence)
        if caches is None:
            caches = self._waiting[sequence] = make_prompt_cache(self._model)
        self._model(mx.array(list(tokens), mx.int32)[None], cache=caches)
        mx.eval([array for cache in caches for _, array in tree_flatten(cache.state) if isinstance(array, mx.array)])

    def decode(self, sequences: Sequence[Hashable], tokens: mx.array | Sequence[int]) -> mx.array:
        """Runs one decode step and returns the logits, `[batch, vocab]` float32, in the order of `sequences`.

        Args:
            sequences: Keys of the sequences that decode now. A sequence that decoded before and is missing here keeps
                its KV until it decodes again or is released.
            tokens: The newest token of each.
        """
        inputs = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens), mx.int32)
        is_alone = len(sequences) == 1 and not self._rows
        if is_alone or not self.is_batchable:
            rows = [
                self._model(inputs[row, None, None], cache=self._caches_of(key)) for row, key in enumerate(sequences)
            ]
            logits = mx.concatenate(rows)
        else:
            self._form_batch(sequences)
            order = [self._rows.index(key) for key in sequences]
            if order == list(range(len(order))):
                logits = self._model(inputs[:, None], cache=self._batch)
            else:
                place = mx.array([order.index(row) for row in range(len(order))])
                logits = self._model(inputs[place][:, None], cache=self._batch)[mx.array(order)]
        return logits[:, -1].astype(mx.float32)

    def adopt(self, sequence: Hashable, caches: list[Any]) -> None:
        """Takes over `caches`, one per layer, as those of a new sequence."""
        if sequence in self._waiting or sequence in self._rows:
            raise ValueError(f"sequence {sequence!r} is already known")
        self._waiting[sequence] = caches

    def release(self, sequence: Hashable) -> None:
        """Forgets a sequence. Idempotent."""
        self._waiting.pop(sequence, None)
        if sequence in self._rows:
            self._keep([key for key in self._rows if key != sequence])

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        caches = [*self._batch, *(cache for caches in self._waiting.values() for cache in caches)]
        return sum(cache.nbytes for cache in caches)

    def _caches_of(self, sequence: Hashable) -> list[Any]:
        if sequence not in self._waiting:
            self._waiting[sequence] = make_prompt_cache(self._model)
        return self._waiting[sequence]

    def _form_batch(self, sequences: Sequence[Hashable]) -> None:
        absent = [key for key in self._rows if key not in sequences]
        for key in absent:
            row = self._rows.index(key)
            self._waiting[key] = [cache.extract(row) for cache in self._batch]
        if absent:
            self._keep([key for key in self._rows if key in sequences])
        joining = [key for key in sequences if key not in self._rows]
        if not joining:
            return
        joined = [self._caches_of(key) for key in joining]
        for key in joining:
            del self._waiting[key]
        merged = [type(layer[0]).merge(list(layer)) for layer in zip(*joined, strict=True)]
        if self._rows:
            for mine, other in zip(self._batch, merged, strict=True):
                mine.extend(other)
        else:
            self._batch = merged
        self._rows.extend(joining)

    def _keep(self, keys: list[Hashable]) -> None:
        if keys:
            places = [self._rows.index(key) for key in keys]
            for cache in self._batch:
                cache.filter(mx.array(places))
        else:
            self._batch = []
        self._rows = keys


# Its attention multiplies scores of five axes with the mask of a padded batch, which has four.
_NO_BATCH_MASK = "mlx_lm.models.gemma2"


def why_one_sequence(model: object) -> str | None:
    """Why mlx-lm's caches hold one sequence at a time of this model; None if they can be batched."""
    if type(model).__module__ == _NO_BATCH_MASK:
        return f"{_NO_BATCH_MASK} takes no padded batch"
    unbatched = {type(cache).__name__ for cache in make_prompt_cache(model) if not hasattr(cache, "merge")}
    return f"{', '.join(sorted(unbatched))} holds one sequence" if unbatched else None

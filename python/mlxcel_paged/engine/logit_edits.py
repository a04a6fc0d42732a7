"""Changes logits as the rows of a batch ask for it: bias, penalties, grammar. Rows that ask for nothing cost nothing.

What is kept per sequence is a function of its request and its output tokens, so it is rebuilt from them wherever it is
missing: after a preemption too.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxcel_paged.engine.token_edits import Edits, TokenEdits
from mlxcel_paged.grammar import GrammarError, TokenMatcher
from mlxcel_paged.scheduler import DecodeRow


@dataclass(slots=True)
class _State:
    """Of one sequence: what has seen its first `num_consumed` output tokens."""

    token_edits: TokenEdits
    matcher: TokenMatcher | None
    num_consumed: int = 0


class LogitEdits:
    """Edits batches of logits.

    Args:
        xp: array module of the logits, `numpy` or `mlx.core`.
    """

    def __init__(self, xp: Any = np) -> None:
        self._xp = xp
        self._states: dict[int, _State] = {}

    @property
    def num_sequences(self) -> int:
        """Sequences that something is kept for."""
        return len(self._states)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops what is kept for sequences that have ended or were preempted."""
        if self._states:
            for sequence_id in sequence_ids:
                self._states.pop(sequence_id, None)

    def apply(self, logits: Any, rows: Seq[DecodeRow]) -> tuple[Any, dict[int, Exception]]:
        """Returns the logits to sample from, and the rows whose grammar can say no more, by index.

        Args:
            logits: [num_rows, vocab_size] float32; not changed.
            rows: the decode rows. Those that need their history have no token in flight.
        """
        edited = [index for index, row in enumerate(rows) if row.sampling.edits_logits]
        failures: dict[int, Exception] = {}
        if not edited:
            return logits, failures
        token_edits: list[tuple[int, Edits]] = []
        masks: list[tuple[int, NDArray[np.uint32]]] = []
        for index in edited:
            row = rows[index]
            try:
                state = self._state(row)
                if state.matcher is not None:
                    masks.append((index, _resized(state.matcher.allowed(), logits.shape[-1])))
            except GrammarError as error:
                failures[index] = error
                continue
            token_edits.append((index, state.token_edits.edits()))
        apply = _apply_in_host_memory if self._xp is np else self._apply_on_device
        return apply(logits, token_edits, masks), failures

    def _state(self, row: DecodeRow) -> _State:
        sequence, sampling = row.sequence, row.sampling
        state = self._states.get(sequence.sequence_id)
        if state is None:
            matcher = None if sampling.grammar is None else sampling.grammar.new_matcher()
            state = _State(TokenEdits(sampling, sequence.request.prompt_token_ids), matcher)
            self._states[sequence.sequence_id] = state
        if sampling.needs_history:
            token_ids = sequence.token_ids[sequence.num_prompt_tokens + state.num_consumed :]
            state.num_consumed += len(token_ids)
            if state.num_consumed != row.sample_index:
                raise RuntimeError(f"{row.sample_index} tokens precede this one, {state.num_consumed} are known")
            state.token_edits.consume(token_ids)
            if state.matcher is not None:
                state.matcher.consume(token_ids)
        return state

    def _apply_on_device(
        self, logits: Any, token_edits: list[tuple[int, Edits]], masks: list[tuple[int, NDArray[np.uint32]]]
    ) -> Any:
        mx = self._xp
        logits = mx.array(logits)  # a handle of its own: the assignments below leave the caller's array as it is
        parts = [(index, edits) for index, edits in token_edits if len(edits.token_ids)]
        if parts:
            rows = mx.array(np.concatenate([np.full(len(edits.token_ids), index, np.int32) for index, edits in parts]))
            token_ids, bias, repetition, penalty = (
                mx.array(np.concatenate([edits[part] for _, edits in parts])) for part in range(4)
            )
            values = logits[rows, token_ids] + bias
            values = mx.where(values > 0.0, values / repetition, values * repetition) - penalty
            logits[rows, token_ids] = values
        if masks:
            rows = mx.array([index for index, _ in masks])
            words = mx.array(np.stack([mask for _, mask in masks]))
            bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
            allowed = bits.reshape(len(masks), -1)[:, : logits.shape[-1]].astype(mx.bool_)
            logits[rows] = mx.where(allowed, logits[rows], -mx.inf)
        return logits


def _apply_in_host_memory(
    logits: Any, token_edits: list[tuple[int, Edits]], masks: list[tuple[int, NDArray[np.uint32]]]
) -> Any:
    logits = logits.copy()
    for index, (token_ids, bias, repetition, penalty) in token_edits:
        if len(token_ids):
            values = logits[index, token_ids] + bias
            logits[index, token_ids] = np.where(values > 0.0, values / repetition, values * repetition) - penalty
    for index, mask in masks:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: logits.shape[-1]].view(np.bool_)
        np.copyto(logits[index], -np.inf, where=~allowed)
    return logits


def _resized(mask: NDArray[np.uint32], vocab_size: int) -> NDArray[np.uint32]:
    """The mask of a tokenizer over the logits of a model, which may have more: those are no tokens."""
    num_words = -(-vocab_size // 32)
    return mask[:num_words] if len(mask) >= num_words else np.pad(mask, (0, num_words - len(mask)))

"""What one request adds to and takes off the logits of single tokens: its bias and its penalties.

Per token that is touched, in the order of mlx-lm and vLLM:

    value = logit + bias
    value = value / repetition if value > 0 else value * repetition      tokens of prompt and output
    value = value - (presence + frequency * count)                       tokens of the output, count times in it
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlxcel_paged.request import SamplingParams

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]

# A logit divided by less would leave f32, and a row whose largest logit is not finite fails the whole step.
_MIN_REPETITION = 1e-30


class Edits(NamedTuple):
    """Parallel arrays over the touched tokens of one row."""

    token_ids: Ids
    bias: Floats
    repetition: Floats
    penalty: Floats


class TokenEdits:
    """The edits of one sequence, kept up to date with its tokens.

    Args:
        sampling: bias and penalties.
        prompt_token_ids: tokens of the prompt.

    Attributes:
        num_consumed: output tokens that it knows of.
    """

    def __init__(self, sampling: SamplingParams, prompt_token_ids: Seq[int]) -> None:
        self._sampling = sampling
        self.num_consumed = 0
        self._place_of: dict[int, int] = {}  # token id -> place in the arrays
        self._num_edits = 0
        self._token_ids: Ids = np.zeros(64, dtype=np.int32)
        self._bias: Floats = np.zeros(64, dtype=np.float32)
        self._is_seen: NDArray[np.bool_] = np.zeros(64, dtype=np.bool_)
        self._counts: Floats = np.zeros(64, dtype=np.float32)
        for token_id, bias in sampling.logit_bias:
            place = self._place(token_id)  # before the array is looked up: it may be replaced by a longer one
            self._bias[place] = bias
        if sampling.repetition_penalty != 1.0:
            for token_id in set(prompt_token_ids):
                place = self._place(token_id)
                self._is_seen[place] = True

    def consume(self, token_ids: Seq[int]) -> None:
        """Takes note of further output tokens."""
        self.num_consumed += len(token_ids)
        if self._sampling.has_penalties:
            for token_id in token_ids:
                place = self._place(token_id)
                self._is_seen[place] = True
                self._counts[place] += 1.0

    def edits(self) -> Edits:
        """What is done to the logits of the next token."""
        sampling = self._sampling
        used = slice(self._num_edits)
        counts = self._counts[used]
        factor = min(max(sampling.repetition_penalty, _MIN_REPETITION), 1.0 / _MIN_REPETITION)
        repetition = np.where(self._is_seen[used], np.float32(factor), np.float32(1.0))
        penalty = np.float32(sampling.frequency_penalty) * counts
        penalty += np.float32(sampling.presence_penalty) * (counts > 0.0)
        return Edits(self._token_ids[used], self._bias[used], repetition, penalty)

    def _place(self, token_id: int) -> int:
        place = self._place_of.get(token_id)
        if place is None:
            place = self._place_of[token_id] = self._num_edits
            self._num_edits += 1
            if place == len(self._token_ids):
                self._grow()
            self._token_ids[place] = token_id
        return place

    def _grow(self) -> None:
        num_new = len(self._token_ids)
        self._token_ids = np.concatenate([self._token_ids, np.zeros(num_new, dtype=np.int32)])
        self._bias = np.concatenate([self._bias, np.zeros(num_new, dtype=np.float32)])
        self._is_seen = np.concatenate([self._is_seen, np.zeros(num_new, dtype=np.bool_)])
        self._counts = np.concatenate([self._counts, np.zeros(num_new, dtype=np.float32)])

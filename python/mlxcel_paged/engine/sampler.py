"""Chooses one token per decode row, with the semantics of `mlx_lm.sample_utils.make_sampler`.

Order of the filters as there: top_p, min_p and top_k look at the distribution at temperature 1, then the temperature is
applied to what is left. Each filter keeps the most likely tokens down to some value, so all of them together are one
threshold per row. Where tokens tie at a threshold all of them are kept (mlx-lm's top_k keeps an arbitrary choice).

The random number of a token is a hash of the request's seed and the token's index alone, and every operation here
works along rows. So a request's stream depends neither on its neighbours nor on its place in the batch, and preemption
does not change it.

The same code runs on NumPy and on MLX arrays. On the CPU NumPy is used: MLX's own sort and exp take 20 to 40 times as
long there (2026-11, 4 x 49152 logits: sort 12.9 ms against 0.35 ms), and the logits are in host memory anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np

from mlxcel_paged.random_stream import uniform
from mlxcel_paged.request import SamplingParams

# Below this the distribution is the maximum alone in f32; smaller values would only overflow.
_MIN_TEMPERATURE = 1e-5
_MAX_TOP_K = 1 << 31  # more than any vocabulary has; an integer of a request may be too large for a float
_NUM_CANDIDATES = 1024
_BLOCK = 128
_ALMOST_ONE = 1.0 - 2.0**-22


class SampleRow(Protocol):
    """What the sampler needs to know about a row of logits."""

    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def sample_index(self) -> int: ...


class Sampler:
    """Samples a batch of rows that may each want something else.

    Args:
        xp: array module to compute with, `numpy` or `mlx.core`.
    """

    def __init__(self, xp: Any = np) -> None:
        self._xp = xp

    def sample(self, logits: Any, rows: Seq[SampleRow]) -> Any:
        """Chooses one token per row.

        Args:
            logits: [num_rows, vocab_size] float32, of the array module given; at least one finite value per row.
            rows: parameters per row.

        Returns:
            [num_rows] integer token ids, of the array module given; lazy with MLX.

        Raises:
            FloatingPointError: a row's largest logit is not finite. Checked in host memory only: a GPU would have to be
                waited for.
        """
        xp = self._xp
        tokens = xp.argmax(logits, axis=-1)
        if xp is np:
            peaks = np.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
            if not np.isfinite(peaks).all():
                wrong = int(np.flatnonzero(~np.isfinite(peaks))[0])
                raise FloatingPointError(f"the largest logit of row {wrong} is {peaks[wrong]}")
        random_rows = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
        if not random_rows:
            return tokens
        chosen = [rows[index] for index in random_rows]
        if len(chosen) == len(rows):
            return self._draw(logits, chosen)
        indices = xp.array(random_rows)
        tokens[indices] = self._draw(xp.take(logits, indices, axis=0), chosen).astype(tokens.dtype)
        return tokens

    def _draw(self, logits: Any, rows: Seq[SampleRow]) -> Any:
        """Inverts the cumulative distribution of each row at the row's uniform number."""
        xp = self._xp
        # One small array per step: each upload costs on CUDA.
        parameters = xp.array([_parameters(row) for row in rows], dtype=xp.float32)
        scale, top_p, log_min_p, top_k, number = (parameters[:, index : index + 1] for index in range(5))
        relative = logits - xp.max(logits, axis=-1, keepdims=True)
        weights = xp.exp(relative * scale)
        needs_order = any(row.sampling.top_p < 1.0 or row.sampling.top_k for row in rows)
        if needs_order or any(row.sampling.min_p for row in rows):
            threshold = log_min_p
            if needs_order:
                threshold = xp.maximum(threshold, self._order_threshold(relative, top_p, top_k))
            weights = xp.where(relative >= threshold, weights, 0.0)
        return self._invert(weights, number)

    def _order_threshold(self, relative: Any, top_p: Any, top_k: Any) -> Any:
        """Returns [rows, 1]: the least of `relative` (logits less their peak) that top_p and top_k keep."""
        xp = self._xp
        vocab_size = relative.shape[-1]
        wanted_mass = top_p * xp.sum(xp.exp(relative), axis=-1, keepdims=True)
        wanted_rank = xp.minimum(top_k, float(vocab_size))
        if xp is np and vocab_size > _NUM_CANDIDATES:
            # The candidates almost always hold what is kept, and sorting them costs a tenth of sorting all.
            ordered = np.sort(np.partition(relative, -_NUM_CANDIDATES, axis=-1)[..., -_NUM_CANDIDATES:])[..., ::-1]
            num_kept = self._num_kept(ordered, wanted_mass, wanted_rank)
            if num_kept.max() < _NUM_CANDIDATES:
                return xp.take_along_axis(ordered, num_kept - 1, axis=-1)
        ordered = xp.sort(relative, axis=-1)[..., ::-1]
        return xp.take_along_axis(ordered, self._num_kept(ordered, wanted_mass, wanted_rank) - 1, axis=-1)

    def _num_kept(self, ordered: Any, wanted_mass: Any, wanted_rank: Any) -> Any:
        """Returns [rows, 1] int32: how many of the `ordered` values, largest first, are kept; at least 1."""
        xp = self._xp
        mass = xp.cumsum(xp.exp(ordered), axis=-1)
        mass_above = xp.concatenate([xp.zeros_like(mass[..., :1]), mass[..., :-1]], axis=-1)
        num_kept = xp.sum(mass_above < wanted_mass, axis=-1, keepdims=True).astype(xp.float32)
        return xp.maximum(xp.minimum(num_kept, wanted_rank), 1.0).astype(xp.int32)

    def _invert(self, weights: Any, number: Any) -> Any:
        """Finds the token at which the running sum of `weights` passes `number` times the whole.

        In two levels, blocks and then inside one: a running sum over the whole row is the slowest part otherwise. Sums
        of two kinds, and a device's parallel scan, disagree in their last bits; a token of weight 0 is never taken.
        """
        xp = self._xp
        padding = -weights.shape[-1] % _BLOCK
        if padding:
            zeros = xp.zeros((weights.shape[0], padding), dtype=xp.float32)
            weights = xp.concatenate([weights, zeros], axis=-1)
        blocks = weights.reshape(weights.shape[0], -1, _BLOCK)
        sums = xp.sum(blocks, axis=-1)
        block, mass_before = self._first_above(sums, number * xp.sum(sums, axis=-1, keepdims=True))
        inside = xp.take_along_axis(blocks, block[..., None], axis=1)[:, 0]
        offset, _ = self._first_above(inside, number * xp.sum(sums, axis=-1, keepdims=True) - mass_before)
        return (block * _BLOCK + offset)[:, 0]

    def _first_above(self, weights: Any, target: Any) -> tuple[Any, Any]:
        """Returns, both [rows, 1], the first place where the running sum passes `target`, and the sum before it."""
        xp = self._xp
        running = xp.cumsum(weights, axis=-1)
        reached = xp.where(weights > 0.0, running, 0.0)
        target = xp.minimum(target, xp.max(reached, axis=-1, keepdims=True) * _ALMOST_ONE)
        place = xp.argmax(reached > target, axis=-1)[:, None]
        return place, xp.take_along_axis(running - weights, place, axis=-1)


def _parameters(row: SampleRow) -> tuple[float, float, float, float, float]:
    sampling = row.sampling
    return (
        1.0 / max(float(sampling.temperature), _MIN_TEMPERATURE),
        float(sampling.top_p) if sampling.top_p < 1.0 else math.inf,
        math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf,
        float(min(sampling.top_k, _MAX_TOP_K)) if sampling.top_k else math.inf,
        uniform(row.seed, row.sample_index),
    )

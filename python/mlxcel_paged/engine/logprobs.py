"""Log-probabilities of sampled tokens and of the most likely ones, for the rows that ask; of the model's own logits."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxcel_paged.engine.sampler import SampleRow
from mlxcel_paged.request import MAX_LOGPROBS, TokenLogprobs


class Logprobs:
    """The answer to one step's rows; `per_row` waits for the device.

    Args:
        xp: array module of the arrays, `numpy` or `mlx.core`.
        logits: [num_rows, vocab_size] float32, as the model gave them.
        token_ids: [num_rows], the sampled tokens.
        rows: what was sampled; at least one asks for log-probabilities.
    """

    def __init__(self, xp: Any, logits: Any, token_ids: Any, rows: Seq[SampleRow]) -> None:
        self._num_rows = len(rows)
        self._asking = [index for index, row in enumerate(rows) if row.sampling.num_logprobs is not None]
        self._num_top = [rows[index].sampling.num_logprobs or 0 for index in self._asking]
        self._host: list[TokenLogprobs] | None = None
        self._device: tuple[Any, ...] = ()
        if xp is np:
            self._host = [
                _row_logprobs(logits[index], int(token_ids[index]), num_top)
                for index, num_top in zip(self._asking, self._num_top, strict=True)
            ]
        else:
            self._launch(xp, logits, token_ids)

    def per_row(self) -> list[TokenLogprobs | None]:
        """Returns one entry per row, None for those that did not ask."""
        found = self._host if self._host is not None else self._collect()
        result: list[TokenLogprobs | None] = [None] * self._num_rows
        for index, entry in zip(self._asking, found, strict=True):
            result[index] = entry
        return result

    def _launch(self, mx: Any, logits: Any, token_ids: Any) -> None:
        indices = mx.array(self._asking)
        logits = mx.take(logits, indices, axis=0)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        sampled = mx.take_along_axis(logprobs, mx.take(token_ids, indices)[:, None], axis=-1)[:, 0]
        # Always as many, so that where tokens tie a row does not depend on what its neighbours ask for.
        num_top = min(MAX_LOGPROBS, logits.shape[-1]) if any(self._num_top) else 0
        top_ids = mx.argpartition(-logprobs, num_top - 1, axis=-1)[:, :num_top]
        top = mx.take_along_axis(logprobs, top_ids, axis=-1)
        mx.async_eval(sampled, top_ids, top)
        self._device = (sampled, top_ids, top)

    def _collect(self) -> list[TokenLogprobs]:
        sampled, top_ids, top = (array.tolist() for array in self._device)
        self._device = ()
        result = []
        for logprob, ids, values, num_top in zip(sampled, top_ids, top, self._num_top, strict=True):
            order = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
            result.append(TokenLogprobs(logprob, tuple(order[:num_top])))
        return result


def _row_logprobs(logits: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    peak = logits.max()
    log_total = peak + np.log(np.exp(logits - peak).sum())
    num_top = min(num_top, len(logits))
    if not num_top:
        return TokenLogprobs(float(logits[token_id] - log_total))
    least = np.partition(logits, -num_top)[-num_top]
    above = np.flatnonzero(logits > least)
    ids = np.concatenate([above, np.flatnonzero(logits == least)[: num_top - len(above)]])
    ids = ids[np.lexsort((ids, -logits[ids]))]
    values = (logits[ids] - log_total).tolist()
    return TokenLogprobs(float(logits[token_id] - log_total), tuple(zip(ids.tolist(), values, strict=True)))

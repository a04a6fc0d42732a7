"""The tokens of the decode batch: sampled at the end of one step, fed to the next."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxcel_paged.engine.logit_edits import LogitEdits
from mlxcel_paged.engine.logprobs import Logprobs
from mlxcel_paged.engine.sampler import Sampler
from mlxcel_paged.engine.token_reader import ArrayTokens, PendingTokens, TokenReader
from mlxcel_paged.request import SamplingParams
from mlxcel_paged.scheduler import DecodeRow, Step, StepResult

_CLEAR_CACHE_INTERVAL_STEPS = 256


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The outcome of a step's decode rows, perhaps still on its way.

    Attributes:
        tokens: one a row.
        logprobs: if a row asked for them.
        failures: rows that could not be sampled, by index.
    """

    tokens: PendingTokens
    logprobs: Logprobs | None
    failures: dict[int, Exception]

    def result(self) -> StepResult:
        """Waits for the tokens."""
        logprobs = None if self.logprobs is None else self.logprobs.per_row()
        return StepResult(self.tokens.wait(), logprobs, self.failures)


class DecodeTokens:
    """Samples a step's rows and feeds them to the next step.

    On the CPU logits are read in place and sampled with NumPy, so a launched step is a finished one. On a GPU all stays
    lazy and on the device: a row whose input is still in flight takes it from the previous step's array.

    Args:
        mx: the module `mlx.core`.
        on_cpu: whether MLX computes in host memory.
        reader: reads the tokens of an NVIDIA GPU; without one they are read out of their array.
    """

    def __init__(self, mx: Any, *, on_cpu: bool, reader: TokenReader | None = None) -> None:
        self._mx = mx
        self._on_cpu = on_cpu
        self._reader = reader
        self._xp = np if on_cpu else mx
        self._sampler = Sampler(self._xp)
        self._edits = LogitEdits(self._xp)
        self._previous: Any = None  # [rows of the last launched step, perhaps padding] int32

    def inputs(self, rows: Seq[DecodeRow], num_rows: int | None = None) -> Any:
        """Returns the input token of every row, [num_rows] int32.

        Args:
            num_rows: rows of the launch, padding behind `rows` included; some token id stands there.
        """
        mx = self._mx
        num_rows = len(rows) if num_rows is None else num_rows
        padding = [0] * (num_rows - len(rows))
        known = [-1 if row.token_id is None else row.token_id for row in rows]
        previous = self._previous
        if all(token_id >= 0 for token_id in known):
            return mx.array(known + padding, dtype=mx.int32)
        is_steady = all(row.token_id is None and row.previous_row == index for index, row in enumerate(rows))
        if is_steady and previous.shape[0] == num_rows:
            return previous
        sources = [row.previous_row if row.token_id is None else 0 for row in rows]
        tokens = mx.take(previous, mx.array(sources + padding))
        if max(known) >= 0:
            fresh = mx.array(known + padding, dtype=mx.int32)
            tokens = mx.where(fresh < 0, tokens, fresh)
        mx.async_eval(tokens)  # apart from the forward pass, whose graph then looks the same in every step
        return tokens

    def sample(self, logits: Any, step: Step) -> SampledStep:
        """Samples one token per row of `step`.

        Args:
            logits: [num_rows, vocab_size] float32, perhaps with padding rows behind.
        """
        mx, rows = self._mx, step.decode
        if self._on_cpu:
            mx.eval(logits)
            logits = np.array(logits, copy=False)
        if logits.shape[0] > len(rows) and not all(_is_plain(row.sampling) for row in rows):
            logits = logits[: len(rows)]
        edited, failures = self._edits.apply(logits, rows)
        tokens = self._sampler.sample(edited, rows)
        if not self._on_cpu:
            # What argmax gives are other 32 bits of the same value: a view costs no launch.
            tokens = tokens.view(mx.int32) if tokens.dtype == mx.uint32 else tokens.astype(mx.int32)
        pending: PendingTokens
        if self._reader is None:
            if not self._on_cpu:
                mx.async_eval(tokens)
            pending = ArrayTokens(tokens, len(rows))
        else:
            pending = self._reader.publish(tokens, len(rows))
        if not self._on_cpu:
            self._previous = tokens  # of a step that is on its way
        logprobs = None
        if any(row.sampling.num_logprobs is not None for row in rows):
            logprobs = Logprobs(self._xp, logits, tokens, rows)
        self._tidy(step)
        return SampledStep(pending, logprobs, failures)

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forgets sequences that ended or were preempted."""
        self._edits.forget(sequence_ids)

    def skip(self, step: Step) -> None:
        """Notes a step that decodes nothing."""
        self._tidy(step)

    def _tidy(self, step: Step) -> None:
        # Chunks of ever new lengths leave buffers in MLX's cache that no later step has the size to use.
        if step.prefill or step.step_id % _CLEAR_CACHE_INTERVAL_STEPS == 0:
            self._mx.clear_cache()


def _is_plain(sampling: SamplingParams) -> bool:
    """Whether the most likely token is all that is wanted of a row, so that padding rows do no harm."""
    return sampling.is_greedy and not sampling.edits_logits and sampling.num_logprobs is None

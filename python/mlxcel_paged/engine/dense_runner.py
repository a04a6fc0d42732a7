"""Runs steps on mlx-lm's own caches: the arm without pages."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from mlxcel_paged.engine.decode_tokens import DecodeTokens, SampledStep
from mlxcel_paged.scheduler import Step, StepResult

if TYPE_CHECKING:
    from mlxcel_paged.models.dense_model import DenseModel


class DenseRunner:
    """Executes steps with a `DenseModel`, whose caches go by sequence id.

    Args:
        model: model over its own caches.
        tokens: sampling and the hand-over of tokens between steps.
    """

    def __init__(self, model: DenseModel, tokens: DecodeTokens) -> None:
        self._model = model
        self._tokens = tokens

    def launch(self, step: Step) -> SampledStep | None:
        for chunk in step.prefill:
            self._model.prefill(chunk.sequence.sequence_id, chunk.token_ids, chunk.start)
        if not step.decode:
            self._tokens.skip(step)
            return None
        sequence_ids = [row.sequence.sequence_id for row in step.decode]
        logits = self._model.decode(sequence_ids, self._tokens.inputs(step.decode))
        return self._tokens.sample(logits, step)

    def collect(self, launch: SampledStep | None) -> StepResult:
        return StepResult([]) if launch is None else launch.result()

    def release(self, sequence_ids: Seq[int]) -> None:
        self._tokens.release(sequence_ids)
        for sequence_id in sequence_ids:
            self._model.release(sequence_id)

    def outcomes(self) -> dict[str, int]:
        return {}

    def prefill_outcomes(self) -> dict[str, int]:
        return {}

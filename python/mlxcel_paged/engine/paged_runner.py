"""Runs steps on pages: one forward pass per prefill chunk and one for the whole decode batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from mlxcel_paged.engine.decode_tokens import DecodeTokens, SampledStep
from mlxcel_paged.scheduler import Step, StepResult

if TYPE_CHECKING:
    from mlxcel_paged.models.paged_model import PagedModel


class PagedRunner:
    """Executes steps with a `PagedModel`. The scheduler has already moved page tables and plans.

    Args:
        model: model over pages.
        tokens: sampling and the hand-over of tokens between steps.
    """

    def __init__(self, model: PagedModel, tokens: DecodeTokens) -> None:
        self._model = model
        self._tokens = tokens

    def launch(self, step: Step) -> SampledStep | None:
        try:
            return self._launch(step)
        except Exception:
            self._model.drop_pass()  # before the step's pages go to others
            raise

    def _launch(self, step: Step) -> SampledStep | None:
        for copy in step.copies:
            self._model.copy_pages(copy.group, [(copy.src, copy.dst)])
        for chunk in step.prefill:
            self._model.prefill(chunk.token_ids, chunk.sequence.tables, chunk.start)
        if not step.decode:
            self._tokens.skip(step)
            return None
        num_rows = self._model.launch_rows(len(step.decode))
        logits = self._model.decode(self._tokens.inputs(step.decode, num_rows))
        return self._tokens.sample(logits, step)

    def collect(self, launch: SampledStep | None) -> StepResult:
        return StepResult([]) if launch is None else launch.result()

    def release(self, sequence_ids: Seq[int]) -> None:
        self._tokens.release(sequence_ids)

    def outcomes(self) -> dict[str, int]:
        return self._model.outcomes.snapshot()

    def prefill_outcomes(self) -> dict[str, int]:
        return self._model.outcomes.snapshot_prefill()

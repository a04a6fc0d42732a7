"""What one engine step computes, and what comes back from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxcel_paged.request import SamplingParams, TokenLogprobs
from mlxcel_paged.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from mlxcel_paged._core import PagePool


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy-on-write: page `src` of a KV group is copied to `dst` before the step writes."""

    group: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens of one prompt whose keys and values are written; no logits.

    `sequence.tables` already hold the pages, and their last `len(token_ids)` tokens are these.
    """

    sequence: Sequence
    token_ids: list[int]
    start: int  # absolute position of the first token


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One row of the decode batch, in plan row order.

    `token_id` is the input token, or None when the previous step samples it: in that step's row `previous_row`.
    The row samples output token `sample_index` of its request, counted from 0 over the request's whole life.
    """

    sequence: Sequence
    token_id: int | None
    previous_row: int
    position: int  # absolute position of the input token
    sample_index: int

    @property
    def sampling(self) -> SamplingParams:
        return self.sequence.request.sampling

    @property
    def seed(self) -> int:
        return self.sequence.seed


@dataclass(slots=True, eq=False)
class Step:
    """One unit of work: page copies first, then prefill chunks, then one decode row per running sequence."""

    step_id: int
    copies: list[PageCopy] = field(default_factory=list)
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    is_retired: bool = False
    # What must stay allocated until this step has retired.
    parting: list[Sequence] = field(default_factory=list)
    parting_pages: list[tuple[PagePool, list[int]]] = field(default_factory=list)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.prefill)

    @property
    def sequences(self) -> list[Sequence]:
        """Every sequence that the step computes something for, each once."""
        return [chunk.sequence for chunk in self.prefill] + [row.sequence for row in self.decode]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step's decode rows, in row order.

    Attributes:
        token_ids: the sampled token of each row.
        logprobs: per row, None for those that did not ask; None altogether if no row did.
        failures: rows that could not be sampled, by index; their tokens mean nothing.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    failures: dict[int, Exception] = field(default_factory=dict)

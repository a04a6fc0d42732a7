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

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Prefills the next `num_tokens` tokens of a prompt, whose pages are there."""
        start = sequence.num_computed_tokens
        self.prefill.append(PrefillChunk(sequence, sequence.token_ids[start : start + num_tokens], start))
        sequence.num_computed_tokens += num_tokens
        sequence.last_step = self

    def add_row(self, sequence: Sequence) -> None:
        """Decodes the next token of a sequence, the last row so far of the plan."""
        is_known = sequence.num_in_flight_tokens == 0
        row = DecodeRow(
            sequence,
            sequence.token_ids[-1] if is_known else None,
            sequence.last_row,
            sequence.num_computed_tokens,
            sequence.num_generated_tokens + sequence.num_in_flight_tokens,
        )
        sequence.num_computed_tokens += 1
        sequence.num_in_flight_tokens += 1
        sequence.last_step, sequence.last_row = self, len(self.decode)
        self.decode.append(row)

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

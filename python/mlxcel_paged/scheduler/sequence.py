"""One request while it is alive: its tokens, how far their keys and values are computed, and what it holds."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from mlxcel_paged.request import Request

if TYPE_CHECKING:
    from mlxcel_paged._core import PageTable, Slot
    from mlxcel_paged.scheduler.prefix_cache import PrefixNode
    from mlxcel_paged.scheduler.step import Step


class SequenceStatus(Enum):
    """Where a sequence is. It moves WAITING -> PREFILL -> DECODE -> FINISHED; preemption moves it back to WAITING."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Sequence:
    """Tokens and holdings of one request.

    Tokens of `token_ids` by how far they are:

        [0, num_computed_tokens)                 keys and values are written, or a step in flight writes them
        [num_computed_tokens, num_tokens - 1)    to be prefilled in chunks
        [num_tokens - 1, num_tokens)             input of the next decode row

    A decode row in flight computes one token more than is known here, so there num_computed_tokens == num_tokens - 1 +
    num_in_flight_tokens.

    Attributes:
        sequence_id: order of arrival, unique for the scheduler's life.
        max_tokens: tokens to generate, clamped to what the context and the pool hold.
        tables: one page table per KV group; empty while it waits, and always with dense storage.
        slots: one plan slot per KV group while it decodes.
        num_committed_tokens: tokens whose keys and values are there for certain: the steps that wrote them retired.
        prefix_nodes: pages of the prefix cache that it shares, from its first token on.
        publishes: whether its further pages go to the prefix cache.
        num_in_flight_tokens: tokens that launched steps will append.
        last_step: the newest step that it takes part in.
        last_row: its row in the decode batch of `last_step`.
        admitted_at: when it was first admitted, on the scheduler's clock.
        num_cached_tokens: prompt tokens that its first admission found computed.
    """

    __slots__ = (
        "admitted_at",
        "last_row",
        "last_step",
        "max_tokens",
        "num_cached_tokens",
        "num_committed_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "prefix_nodes",
        "publishes",
        "request",
        "seed",
        "sequence_id",
        "slots",
        "status",
        "stop_token_ids",
        "tables",
        "token_ids",
    )

    def __init__(
        self, request: Request, *, sequence_id: int, max_tokens: int, seed: int, stop_token_ids: frozenset[int]
    ) -> None:
        self.request = request
        self.sequence_id = sequence_id
        self.status = SequenceStatus.WAITING
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_committed_tokens = 0
        self.prefix_nodes: list[PrefixNode] = []
        self.publishes = True
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.admitted_at = 0.0
        self.max_tokens = max_tokens
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.tables: list[PageTable] = []
        self.slots: list[Slot] = []
        self.last_step: Step | None = None
        self.last_row = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and committed output."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_num_tokens(self) -> int:
        """Tokens whose keys and values are kept when it ends by length: all but the last output token."""
        return self.num_prompt_tokens + self.max_tokens - 1

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens still to be prefilled before the first decode row."""
        return max(0, len(self.token_ids) - 1 - self.num_computed_tokens)

    @property
    def num_tokens_to_schedule(self) -> int:
        """Output tokens that no step was scheduled for yet."""
        return self.max_tokens - self.num_generated_tokens - self.num_in_flight_tokens

    @property
    def is_in_flight(self) -> bool:
        """Whether a launched step that reads or writes its pages has not retired."""
        return self.last_step is not None and not self.last_step.is_retired

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

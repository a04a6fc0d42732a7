"""The pages and plan slots of sequences, moved in every KV group together.

The scheduler is the only one that takes pages, so "ask, then act" holds: what `pages_needed` says fits, `append` gets.
With dense storage there are no groups, every sum is zero, and nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxcel_paged._core import DecodeRows, PageTable
from mlxcel_paged.scheduler.estimate import max_pages_held, max_tokens_held
from mlxcel_paged.scheduler.plan_log import PlanCause, PlanLog
from mlxcel_paged.scheduler.prefix_cache import PrefixCache, PrefixNode
from mlxcel_paged.scheduler.sequence import Sequence
from mlxcel_paged.scheduler.step import PageCopy, Step

if TYPE_CHECKING:
    from mlxcel_paged._core import DecodePlan, PagePool


@dataclass(frozen=True, slots=True)
class PagedGroup:
    """One KV group: the layers that share page ids, hence one pool, one table per sequence and one plan."""

    pool: PagePool
    plan: DecodePlan
    page_size: int
    window: int | None = None


class PagedGroups:
    """All KV groups of a model. Every change of a plan goes through `plan_log`.

    Args:
        groups: none with dense storage.
        prefill_chunk: tokens of a chunk at most.
        keeps_prefixes: keep full pages for prompts that start alike. Not where a group has a window: its head pages are
            gone by the time that a sequence has many.

    Attributes:
        prefix_cache: None where nothing is kept.
    """

    def __init__(
        self,
        groups: Iterable[PagedGroup],
        prefill_chunk: int,
        *,
        keeps_prefixes: bool = False,
        plan_log: PlanLog | None = None,
    ) -> None:
        self.groups = tuple(groups)
        page_sizes = {group.page_size for group in self.groups}
        can_keep = len(page_sizes) == 1 and all(group.window is None for group in self.groups)
        self.prefix_cache: PrefixCache | None = None
        if keeps_prefixes and can_keep:
            self.prefix_cache = PrefixCache([group.pool for group in self.groups], page_sizes.pop())
        self.plan_log = plan_log or PlanLog()
        self._prefill_chunk = prefill_chunk
        self.num_reserved = [0] * len(self.groups)
        self.num_peak = [0] * len(self.groups)
        self._rows = DecodeRows([group.plan for group in self.groups], [group.pool for group in self.groups])
        self._has_taken_pages = False

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens that one sequence reaches at most when it has every page; None is no bound."""
        bounds = (
            max_tokens_held(group.pool.num_pages, group.page_size, group.window, self._prefill_chunk)
            for group in self.groups
        )
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def num_idle(self) -> int:
        """Pages per group that only the prefix cache holds."""
        return 0 if self.prefix_cache is None else self.prefix_cache.num_idle

    def num_free(self) -> list[int]:
        """Pages per group that are free or held by the prefix cache alone."""
        return [group.pool.num_free + self.num_idle for group in self.groups]

    def max_pages(self, num_tokens: int) -> list[int]:
        """Pages per group that a sequence holds at most on its way to `num_tokens` tokens."""
        return [max_pages_held(num_tokens, group.page_size, group.window, self._prefill_chunk) for group in self.groups]

    def pages_needed(self, sequences: Iterable[Sequence], num_tokens: int) -> list[int]:
        """Fresh pages per group that appending `num_tokens` tokens to each sequence takes."""
        sequences = tuple(sequences)
        return [
            PageTable.pages_needed_by([sequence.tables[index] for sequence in sequences], num_tokens)
            for index in range(len(self.groups))
        ]

    def book(self, prefilling: Iterable[Sequence]) -> None:
        """Notes for other threads how many pages are held at most, and how many `prefilling` prompts still need."""
        prefilling = list(prefilling)
        if not (self._has_taken_pages or prefilling or any(self.num_reserved)):
            return
        self._has_taken_pages = False
        reserved = [0] * len(self.groups)
        for sequence in prefilling:
            final = self.max_pages(sequence.num_tokens)
            for index, table in enumerate(sequence.tables):
                reserved[index] += max(0, final[index] - table.num_pages)
        self.num_reserved = reserved
        for index, group in enumerate(self.groups):
            self.num_peak[index] = max(self.num_peak[index], group.pool.num_used)

    def stats(self, *, is_idle: bool) -> dict[str, Any]:
        """The members of `SchedulerStats` that speak of pages; any thread may ask."""
        cache, num_idle, num_groups = self.prefix_cache, self.num_idle, len(self.groups)
        return {
            "num_pages_used": tuple(max(0, group.pool.num_used - num_idle) for group in self.groups),
            "num_pages_cached": (num_idle,) * num_groups,
            "num_pages_reserved": (0,) * num_groups if is_idle else tuple(self.num_reserved),
            "num_pages_peak": tuple(self.num_peak),
            "num_pages": tuple(group.pool.num_pages for group in self.groups),
            "num_prefix_queries": cache.num_queries if cache else 0,
            "num_prefix_hits": cache.num_hits if cache else 0,
            "num_evicted_pages": cache.num_evicted if cache else 0,
        }

    def fits(self, needed: Iterable[int]) -> bool:
        """Whether that many pages per group are free, or become so when the prefix cache gives them up."""
        return all(count <= free for count, free in zip(needed, self.num_free(), strict=True))

    def make_room(self, needed: Iterable[int]) -> None:
        """Lets the prefix cache give up what `needed`, which fits, takes beyond the free pages."""
        if self.prefix_cache is not None:
            short = max(count - group.pool.num_free for count, group in zip(needed, self.groups, strict=True))
            if short > 0:
                self.prefix_cache.evict(short)

    def make_room_for_rows(self, rows: list[Sequence]) -> bool:
        """Has the prefix cache give up what a token of each row takes; False and no change if it is too much.

        A row takes one page at most, so rows are asked only if fewer are free.
        """
        if any(group.pool.num_free < len(rows) for group in self.groups):
            needed = self.pages_needed(rows, 1)
            if not self.fits(needed):
                return False
            self.make_room(needed)
        return True

    def max_append(self, sequence: Sequence, num_tokens: int) -> int:
        """Tokens, `num_tokens` at most, that can be appended with the pages that are free."""
        low, high = 0, num_tokens
        while low < high:
            middle = high if low == 0 and high == num_tokens else (low + high + 1) // 2
            if self.fits(self.pages_needed((sequence,), middle)):
                low = middle
            else:
                high = middle - 1
        return low

    def find_prefix(self, sequence: Sequence) -> list[PrefixNode]:
        """The cached pages that start a sequence."""
        return [] if self.prefix_cache is None else self.prefix_cache.find(sequence.token_ids)

    def open_tables(self, sequence: Sequence, prefix: list[PrefixNode]) -> None:
        """Gives a sequence its tables, which start on cached pages."""
        sequence.tables = [PageTable(group.pool, group.page_size, group.window) for group in self.groups]
        if prefix and self.prefix_cache is not None:
            self.prefix_cache.use(sequence, prefix)

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Notes that the first `num_tokens` tokens of a sequence are computed for certain."""
        sequence.num_committed_tokens = num_tokens
        if self.prefix_cache is not None:
            self.prefix_cache.publish(sequence)

    def append_chunk(self, sequence: Sequence, num_tokens: int, step: Step) -> None:
        """Takes the pages of a prefill chunk.

        Raises:
            OutOfPagesError: they do not fit.
        """
        self._has_taken_pages = True
        if self.prefix_cache is not None:
            self.make_room(self.pages_needed((sequence,), num_tokens))
        for index, table in enumerate(sequence.tables):
            append = table.append(num_tokens)
            step.copies.extend(PageCopy(index, src, dst) for src, dst in append.copies)

    def try_advance(self, rows: list[Sequence]) -> bool:
        """Gives each row of the decode batch room for one token if none takes a page; False and no change if one does.

        The steady step: one call of the core, whatever the batch.
        """
        if rows and self.groups:
            if not self._rows.try_advance():
                return False
            self._log_resplits()
        return True

    def advance(self, rows: list[Sequence], newcomers: Iterable[Sequence], step: Step) -> None:
        """Gives each row of the decode batch room for one token.

        `rows` hold slots already and only grow; `newcomers` get slots behind them, in the order given.

        Raises:
            OutOfPagesError: a page is not free; ask `make_room_for_rows` first.
        """
        edit = self.plan_log.edit
        grown = self._rows.advance() if rows and self.groups else []
        for index, row, append in grown:
            plan, table, slot = self.groups[index].plan, rows[row].tables[index], rows[row].slots[index]
            for src, dst in append.copies:
                step.copies.append(PageCopy(index, src, dst))
                change = partial(plan.replace_page, slot, table.num_pages - 1, dst)
                edit(PlanCause.COPY_ON_WRITE, index, plan, slot, change)
            for page in append.new_pages:
                edit(PlanCause.PAGE_CROSSING, index, plan, slot, partial(plan.append_page, slot, page))
        if grown:
            self._has_taken_pages = True
            for group in self.groups:
                group.plan.advance()
        for sequence in newcomers:
            self.append_chunk(sequence, 1, step)
            sequence.slots = [
                edit(PlanCause.ADMIT, index, group.plan, None, partial(self._rows.admit, index, table))
                for index, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True))
            ]
        self._log_resplits()

    def _log_resplits(self) -> None:
        if self.plan_log.is_enabled:
            for index, group in enumerate(self.groups):
                self.plan_log.resplit(index, group.plan)

    def leave_batch(self, sequence: Sequence, cause: PlanCause = PlanCause.RETIRE) -> None:
        """Gives the sequence's plan slots back; the rows behind it move up."""
        for index, (group, slot) in enumerate(zip(self.groups, sequence.slots, strict=False)):
            self.plan_log.edit(cause, index, group.plan, slot, partial(self._rows.retire, index, slot))
        sequence.slots = []

    def retire_heads(self, prefilling: Iterable[Sequence], in_flight: Step | None) -> None:
        """Gives back the pages that windows have left after a chunk."""
        if any(group.window is not None for group in self.groups):
            for sequence in prefilling:
                self.retire_head(sequence, in_flight)

    def retire_heads_at_page_end(self, rows: Iterable[Sequence], in_flight: Step | None) -> None:
        """Gives back the pages that windows have left of rows that take a page for their next token."""
        if any(group.window is not None for group in self.groups):
            for sequence in rows:
                if any(table.pages_needed(1) for table in sequence.tables):
                    self.retire_head(sequence, in_flight)

    def retire_head(self, sequence: Sequence, in_flight: Step | None) -> None:
        """Gives back the head pages that left the window; those that a step in flight may read, when it has retired."""
        for index, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            if group.window is None:
                continue
            if in_flight is None:
                num_retired = len(table.retire_head())
            else:
                held = table.pages
                group.pool.retain(held)
                num_retired = len(table.retire_head())
                group.pool.release(held[num_retired:])
                in_flight.parting_pages.append((group.pool, held[:num_retired]))
            if num_retired and sequence.slots:
                slot = sequence.slots[index]
                change = partial(group.plan.retire_head_pages, slot, num_retired, table.first_page_offset)
                self.plan_log.edit(PlanCause.HEAD_RETIRE, index, group.plan, slot, change)

    def release(self, sequence: Sequence) -> None:
        """Gives every page of the sequence back."""
        for table in sequence.tables:
            table.release()
        sequence.tables = []
        sequence.num_committed_tokens = 0
        if self.prefix_cache is not None:
            self.prefix_cache.leave(sequence)

    def check_integrity(self, *, num_rows: int, is_idle: bool) -> None:
        """Checks pools and plans against the number of decoding sequences; see `Scheduler.check_integrity`."""
        num_cached = 0
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
            num_cached = self.prefix_cache.num_pages
        for index, group in enumerate(self.groups):
            group.pool.check_integrity()
            group.plan.validate()
            if group.plan.num_rows != num_rows:
                raise RuntimeError(f"group {index}: {group.plan.num_rows} plan rows, {num_rows} decoding")
            if is_idle and group.pool.num_used != num_cached:
                num_lost = group.pool.num_used - num_cached
                raise RuntimeError(f"group {index}: {num_lost} pages are held by no sequence")

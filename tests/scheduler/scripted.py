"""A runner without a model: pages hold token ids, and the next token is a hash of the tokens that a row can see.

Everything that a real runner reads is read from the pages through what the scheduler hands over (tables for prefill,
the plan's CSR for decode), so a wrong page, a stale row, a page given back too early or a token computed twice changes
the output. A step runs when it is collected, as late as on a device, from what was captured when it was launched.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from mlxcel_paged import _core
from mlxcel_paged.request import FinishReason, Request, SamplingParams, TokenEvent
from mlxcel_paged.scheduler import PagedGroup, Scheduler, SchedulerConfig, Step, StepResult
from mlxcel_paged.scheduler.sequence import Sequence

VOCAB_SIZE = 97
POISON = -1


def next_token(tokens: Seq[int], windows: Seq[int | None]) -> int:
    """The oracle: a token from the last `window` tokens of every KV group."""
    visible = [tokens if window is None else tokens[-window:] for window in windows]
    return zlib.crc32(repr([list(part) for part in visible]).encode()) % VOCAB_SIZE


def solo(
    prompt: Seq[int],
    max_tokens: int,
    windows: Seq[int | None] = (None,),
    stop_token_ids: Iterable[int] = (),
) -> list[int]:
    """What a request gives alone, from the oracle: no scheduler, no pages."""
    tokens = list(prompt)
    stops = set(stop_token_ids)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, windows))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def make_group(
    num_pages: int, page_size: int, *, window: int | None = None, max_slots: int = 8, max_pages: int = 300
) -> PagedGroup:
    plan = _core.DecodePlan(
        max_slots=max_slots,
        max_pages_per_slot=min(num_pages, max_pages),
        num_pages=num_pages,
        page_size=page_size,
        num_qo_heads=2,
        num_kv_heads=1,
        head_dim=64,
        window=window,
    )
    return PagedGroup(_core.PagePool(num_pages), plan, page_size, window)


@dataclass
class _Launch:
    step: Step
    copies: list[tuple[int, int, int]]
    prefill: list[tuple[list[int], int, list[tuple[list[int], int]]]]  # tokens, start, per group (pages, base position)
    rows: list[list[tuple[list[int], int, int, int]]]  # per row and group: pages, first offset, length, next position
    inputs: list[int | None]
    previous_rows: list[int]
    held: list[tuple[Any, list[int]]] = field(default_factory=list)


class ScriptedRunner:
    """Executes steps over pages of token ids. `fail` raises for chosen steps, given (phase, step)."""

    def __init__(
        self, groups: Seq[PagedGroup], *, fail: Callable[[str, Step], Exception | None] = lambda *_: None
    ) -> None:
        self.groups = list(groups)
        self.windows = [group.window for group in groups]
        self.pages = [[[POISON] * group.page_size for _ in range(group.pool.num_pages)] for group in groups]
        self.fail = fail
        self.tokens: list[int] | None = []  # sampled by the step collected last; None if it failed
        self.failed: set[str] = set()  # requests of steps that raised
        self.dense: dict[int, list[int]] = {}
        self.released: list[int] = []
        self.max_batch = 0
        self.num_rows = 0
        self.max_prefill = 0

    def launch(self, step: Step) -> _Launch:
        self._raise_if_asked("launch", step)
        self.max_batch = max(self.max_batch, len({sequence.sequence_id for sequence in step.sequences}))
        self.num_rows += len(step.decode)
        self.max_prefill = max(self.max_prefill, step.num_prefill_tokens)
        launch = _Launch(
            step,
            [(copy.group, copy.src, copy.dst) for copy in step.copies],
            [],
            [],
            [row.token_id for row in step.decode],
            [row.previous_row for row in step.decode],
        )
        for chunk in step.prefill:
            tables = []
            for group, table in zip(self.groups, chunk.sequence.tables, strict=True):
                assert table.num_tokens == chunk.start + len(chunk.token_ids)
                base = table.num_tokens - table.kv_len - table.first_page_offset
                assert base % group.page_size == 0
                tables.append((list(table.pages), base))
                launch.held.append((group.pool, list(table.pages)))
            launch.prefill.append((chunk.token_ids, chunk.start, tables))
        csrs = []
        for group in self.groups:
            group.plan.validate()
            assert group.plan.num_rows == len(step.decode)
            csrs.append({name: list(getattr(group.plan.export_csr(), name)) for name in CSR_ARRAYS})
        for index, row in enumerate(step.decode):
            parts = []
            for group, csr, slot in zip(self.groups, csrs, row.sequence.slots, strict=True):
                assert group.plan.row_of(slot) == index
                pages = csr["indices"][csr["indptr"][index] : csr["indptr"][index + 1]]
                parts.append((pages, csr["first_page_offset"][index], csr["lengths"][index], csr["positions"][index]))
                assert csr["positions"][index] == row.position + 1
                launch.held.append((group.pool, pages))
            launch.rows.append(parts)
        return launch

    def collect(self, launch: _Launch) -> StepResult:
        previous_tokens, self.tokens = self.tokens, None
        self._raise_if_asked("collect", launch.step)
        if previous_tokens is None and None in launch.inputs:
            self.failed.update(sequence.request_id for sequence in launch.step.sequences)
            raise RuntimeError("the step that should have sampled the input failed")
        for pool, pages in launch.held:
            for page in pages:
                assert pool.refcount(page) > 0, "a page of a step in flight was given back"
        for group, src, dst in launch.copies:
            self.pages[group][dst] = list(self.pages[group][src])
        for tokens, start, tables in launch.prefill:
            for group, (pages, base) in enumerate(tables):
                for offset, token in enumerate(tokens):
                    self._write(group, pages, start + offset - base, token)
        for chunk in launch.step.prefill:
            if not chunk.sequence.is_finished:
                # A sequence may start on cached pages; decoding compares what they hold with its own tokens.
                start = chunk.sequence.token_ids[: chunk.start]
                cache = self.dense.setdefault(chunk.sequence.sequence_id, start)
                assert len(cache) == chunk.start
                cache.extend(chunk.token_ids)
        inputs = [
            previous_tokens[previous] if token is None else token
            for token, previous in zip(launch.inputs, launch.previous_rows, strict=True)
        ]
        self.tokens = [
            self._decode(row.sequence, token, parts, row.position)
            for row, token, parts in zip(launch.step.decode, inputs, launch.rows, strict=True)
        ]
        return StepResult(self.tokens)

    def release(self, sequence_ids: Seq[int]) -> None:
        self.released.extend(sequence_ids)
        for sequence_id in sequence_ids:
            self.dense.pop(sequence_id, None)

    def outcomes(self) -> dict[str, int]:
        return {}

    def prefill_outcomes(self) -> dict[str, int]:
        return {}

    def _raise_if_asked(self, phase: str, step: Step) -> None:
        error = self.fail(phase, step)
        if error is not None:
            self.failed.update(sequence.request_id for sequence in step.sequences)
            raise error

    def _decode(
        self, sequence: Sequence, token: int, parts: list[tuple[list[int], int, int, int]], position: int
    ) -> int:
        for group, (pages, first, length, _) in enumerate(parts):
            self._write(group, pages, first + length - 1, token)
        if sequence.is_finished:
            return 0  # one row too many, which is dropped
        cache = self.dense.setdefault(sequence.sequence_id, sequence.token_ids[:position])
        assert len(cache) == position
        cache.append(token)
        if not self.groups:
            return next_token(cache, (None,))
        seen = []
        for group, (pages, first, length, _) in enumerate(parts):
            size = self.groups[group].page_size
            tokens = [self.pages[group][pages[at // size]][at % size] for at in range(first, first + length)]
            window = self.windows[group]
            visible = tokens if window is None else tokens[-window:]
            assert visible == (cache if window is None else cache[-window:])
            seen.append(visible)
        return zlib.crc32(repr(seen).encode()) % VOCAB_SIZE

    def _write(self, group: int, pages: list[int], at: int, token: int) -> None:
        size = self.groups[group].page_size
        assert self.groups[group].pool.refcount(pages[at // size]) == 1, "writes into a shared page"
        self.pages[group][pages[at // size]][at % size] = token


CSR_ARRAYS = ("indptr", "indices", "first_page_offset", "lengths", "positions")


class Loop:
    """Drives a scheduler and a runner as the engine does, one turn at a time."""

    def __init__(self, scheduler: Scheduler, runner: ScriptedRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.flights: list[tuple[Step, Any]] = []
        self.events: list[TokenEvent] = []
        self.num_turns = 0

    def add(self, request_id: str, prompt: Seq[int], max_tokens: int | None = None, **sampling: Any) -> None:
        self.scheduler.add(Request(request_id, list(prompt), SamplingParams(max_tokens=max_tokens, **sampling), 0.0))

    def turn(self) -> bool:
        """Schedules, launches and retires once; False when nothing is left to do."""
        self.num_turns += 1
        step = self.scheduler.schedule()
        events = self.scheduler.take_events()
        self.events += events
        if step is not None:
            assert step.prefill or step.decode
            try:
                self.flights.append((step, self.runner.launch(step)))
            except RuntimeError as error:
                self.flights.append((step, error))
        assert step or self.flights or events or not self.scheduler.has_work, "nothing can be scheduled"
        is_broken = bool(self.flights) and isinstance(self.flights[-1][1], RuntimeError)
        num_kept = 0 if step is None or is_broken else self.scheduler.config.pipeline_depth
        while len(self.flights) > num_kept:
            self.retire()
        self.runner.release(self.scheduler.take_released())
        return self.scheduler.has_work

    def retire(self) -> None:
        step, launch = self.flights.pop(0)
        try:
            if isinstance(launch, RuntimeError):
                raise launch
            result = self.runner.collect(launch)
        except RuntimeError as error:
            self.events += self.scheduler.fail(step, error)
        else:
            self.events += self.scheduler.commit(step, result)

    def run(self, max_turns: int = 10_000) -> None:
        while self.turn():
            assert self.num_turns < max_turns, "no end in sight"
        self.events += self.scheduler.take_events()

    def tokens(self, request_id: str) -> list[int]:
        return [
            event.token_id for event in self.events if event.request_id == request_id and event.token_id is not None
        ]

    def finish_reasons(self, request_id: str) -> list[FinishReason]:
        return [
            event.finish_reason
            for event in self.events
            if event.request_id == request_id and event.finish_reason is not None
        ]

    def check_drained(self) -> None:
        """Nothing is held, remembered or in flight any more."""
        scheduler = self.scheduler
        assert not scheduler.has_work
        assert not self.flights
        scheduler.check_integrity()
        stats = scheduler.stats()
        assert (stats.num_running, stats.num_waiting, sum(stats.num_pages_used)) == (0, 0, 0)
        assert not scheduler.take_events()
        assert not self.runner.dense
        for group in scheduler.groups.groups:
            assert group.plan.num_rows == 0
            assert group.pool.num_used == scheduler.groups.num_idle


def make_loop(
    groups: Seq[PagedGroup] = (),
    *,
    max_batch_size: int = 4,
    max_context: int = 1000,
    prefill_chunk: int = 8,
    pipeline_depth: int = 0,
    eos_token_ids: Iterable[int] = (),
    fail: Callable[[str, Step], Exception | None] = lambda *_: None,
    prefix_cache: bool = False,
) -> Loop:
    config = SchedulerConfig(
        max_batch_size=max_batch_size,
        max_context=max_context,
        vocab_size=VOCAB_SIZE,
        prefill_chunk=prefill_chunk,
        eos_token_ids=frozenset(eos_token_ids),
        pipeline_depth=pipeline_depth,
        prefix_cache=prefix_cache,
    )
    scheduler = Scheduler(config, groups, clock=lambda: 0.0)
    return Loop(scheduler, ScriptedRunner(groups, fail=fail))

"""Continuous batching: decides what every step computes, and owns the sequences and their pages.

A step decodes one token for every running sequence and prefills at most one chunk budget of prompt tokens beside them.
All prompt tokens but the last are prefilled; the last one is the sequence's first decode row. Pages are reserved before
a step is handed out and given back when the last step that uses them has retired. Plans live as long as the scheduler:
a step changes them by what changed (a row came, left, or crossed into a page), never from scratch.

One thread calls everything here but `check` and `stats`. No MLX, no time but the injected clock.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from mlxcel_paged.request import FinishReason, Request, RequestStart, TokenEvent
from mlxcel_paged.scheduler.admission import can_admit, clamp_max_tokens
from mlxcel_paged.scheduler.config import SchedulerConfig
from mlxcel_paged.scheduler.flights import Flights
from mlxcel_paged.scheduler.groups import PagedGroup, PagedGroups
from mlxcel_paged.scheduler.plan_log import PlanCause, PlanLog
from mlxcel_paged.scheduler.preempt import choose_victim
from mlxcel_paged.scheduler.prefill import split_budget
from mlxcel_paged.scheduler.queue import WaitingQueue
from mlxcel_paged.scheduler.sequence import Sequence, SequenceStatus
from mlxcel_paged.scheduler.stats import SchedulerCounters, SchedulerStats
from mlxcel_paged.scheduler.step import Step, StepResult

_SEED_MASK = 2**64 - 1


class Scheduler:
    """Sequences from arrival to their one finish.

    With pipeline_depth 1, step n + 1 is scheduled before the result of step n is committed: a row of n + 1 whose input
    is still in flight names the row of n that samples it, and a sequence that turns out to have ended in n has one row
    too many in n + 1, which is dropped.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        groups: Iterable[PagedGroup] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self.config = config
        self.groups = PagedGroups(groups, config.prefill_chunk, keeps_prefixes=config.prefix_cache)
        self._capacity_tokens = self.groups.capacity_tokens
        self._clock = clock
        self._draw_seed = draw_seed
        self._sequences: dict[str, Sequence] = {}
        self._waiting = WaitingQueue()
        self._prefilling: list[Sequence] = []  # in order of arrival
        self._decoding: list[Sequence] = []  # in plan row order
        self._in_flight = Flights()
        self._events: list[TokenEvent] = []
        self._released: list[int] = []
        self._counters = SchedulerCounters()
        self._next_sequence_id = 0

    # requests

    def check(self, request: Request) -> None:
        """Raises what `add` would raise for a request that can never be served. Any thread may call it.

        Raises:
            ContextLengthExceededError: the prompt fits neither context nor pool.
            InvalidRequestError: the prompt holds a token id outside the vocabulary.
        """
        clamp_max_tokens(request, self.config, self._capacity_tokens)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: a request of that name is alive, or `check` refuses it.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"a request of that name is alive: {request.request_id}")
        max_tokens = clamp_max_tokens(request, self.config, self._capacity_tokens)
        sampling = request.sampling
        eos = frozenset() if sampling.ignore_eos else self.config.eos_token_ids
        sequence = Sequence(
            request,
            sequence_id=self._next_sequence_id,
            max_tokens=max_tokens,
            seed=(self._draw_seed() if sampling.seed is None else sampling.seed) & _SEED_MASK,
            stop_token_ids=eos.union(sampling.stop_token_ids),
        )
        self._next_sequence_id += 1
        self._sequences[request.request_id] = sequence
        self._waiting.push(sequence)
        if max_tokens == 0:
            self.finish(sequence, FinishReason.LENGTH)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Withdraws a request wherever it is; a name that is not alive is ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self.finish(sequence, reason)

    def finish_all(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Ends every request that is alive."""
        for sequence in list(self._sequences.values()):
            self.finish(sequence, reason, error=error)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        error: Exception | None = None,
        last: TokenEvent | None = None,
    ) -> None:
        """Ends a sequence, whatever its state; the only way out, and idempotent.

        Its row leaves the plan at once. Its pages go back at once, or when the step in flight that uses them retires.

        Args:
            last: the event of its last token.
        """
        if sequence.is_finished:
            return
        self._leave(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.request_id]
        if sequence.last_step is not None and sequence.is_in_flight:
            sequence.last_step.parting.append(sequence)
        else:
            self._release(sequence)
        self._counters.num_finished[reason] += 1
        event = TokenEvent(sequence.request_id) if last is None else last
        self._events.append(replace(event, finish_reason=reason, error=error))

    # steps

    def schedule(self) -> Step | None:
        """Composes the next step and takes its pages.

        Returns None when there is nothing to compute: no request is alive, or what could run needs a step in flight
        to be committed first. Call `take_events` afterwards: a request may have ended here.

        Raises:
            RuntimeError: more steps are in flight than the pipeline is deep.
        """
        if len(self._in_flight) > self.config.pipeline_depth:
            raise RuntimeError(f"{len(self._in_flight)} steps are in flight, commit one first")
        self._drop_complete_rows()
        self._admit()
        step = Step(self._counters.num_steps)
        self.plan_log.step_id = step.step_id
        if not self._schedule_decode(step) or not self._schedule_prefill(step):
            return None
        if not step.prefill and not step.decode:
            return None
        self._counters.num_steps += 1
        self._counters.num_prefilled_tokens += step.num_prefill_tokens
        self._in_flight.push(step)
        self.groups.book(self._prefilling)
        return step

    def commit(self, step: Step, result: StepResult) -> list[TokenEvent]:
        """Retires the oldest step in flight and applies what it sampled.

        Returns:
            The events since the last call, in row order.

        Raises:
            ValueError: it is not the oldest step in flight, or the result has not one token per row.
        """
        if len(result.token_ids) != len(step.decode):
            raise ValueError(f"{len(step.decode)} rows were decoded, got {len(result.token_ids)} tokens")
        self._retire(step)
        for chunk in step.prefill:
            if not chunk.sequence.is_finished:
                self.groups.commit(chunk.sequence, chunk.start + len(chunk.token_ids))
        for index, (row, token_id) in enumerate(zip(step.decode, result.token_ids, strict=True)):
            sequence = row.sequence
            if sequence.is_finished:
                continue
            sequence.num_in_flight_tokens -= 1
            self.groups.commit(sequence, row.position + 1)
            if index in result.failures:
                self.finish(sequence, FinishReason.ERROR, error=result.failures[index])
                continue
            logprobs = None if result.logprobs is None else result.logprobs[index]
            sequence.token_ids.append(token_id)
            self._counters.num_generated_tokens += 1
            start = self._start_of(sequence) if sequence.num_generated_tokens == 1 else None
            event = TokenEvent(sequence.request_id, token_id, logprobs=logprobs, start=start)
            if token_id in sequence.stop_token_ids:
                self.finish(sequence, FinishReason.STOP, last=event)
            elif sequence.num_generated_tokens >= sequence.max_tokens:
                self.finish(sequence, FinishReason.LENGTH, last=event)
            else:
                self._events.append(event)
        return self.take_events()

    def _start_of(self, sequence: Sequence) -> RequestStart:
        queue_s = max(0.0, sequence.admitted_at - sequence.request.arrival_time)
        return RequestStart(queue_s, self._clock() - sequence.admitted_at, sequence.num_cached_tokens)

    def fail(self, step: Step, error: Exception) -> list[TokenEvent]:
        """Retires the oldest step in flight without a result: its requests end with `error`, the others go on."""
        self._retire(step)
        for sequence in step.sequences:
            self.finish(sequence, FinishReason.ERROR, error=error)
        return self.take_events()

    def take_events(self) -> list[TokenEvent]:
        """Returns the events that were not returned yet."""
        events, self._events = self._events, []
        return events

    def take_released(self) -> list[int]:
        """Returns the ids of sequences that gave up their pages or caches since the last call."""
        released, self._released = self._released, []
        return released

    @property
    def plan_log(self) -> PlanLog:
        """Why plans changed."""
        return self.groups.plan_log

    @property
    def has_work(self) -> bool:
        """Whether a request is alive or a step is in flight."""
        return bool(self._sequences or self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue; any thread may ask."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the requests in the queue; any thread may ask."""
        return self._waiting.num_tokens

    @property
    def num_free_places(self) -> int:
        """Sequences that may be admitted beside the running ones if pages allow; any thread may ask."""
        return max(0, self.config.max_batch_size - len(self._prefilling) - len(self._decoding))

    def stats(self) -> SchedulerStats:
        """Returns a snapshot; any thread may call it."""
        head = self._waiting.head
        return self._counters.snapshot(
            **self.groups.stats(is_idle=not self._sequences),
            num_running=len(self._prefilling) + len(self._decoding),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            oldest_wait_s=0.0 if head is None else max(0.0, self._clock() - head.request.arrival_time),
        )

    def counts(self) -> dict[str, int]:
        """What requests have left here; all 0 when nothing is alive. Any thread may call it."""
        return {
            "sequences": len(self._sequences),
            "steps_in_flight": len(self._in_flight),
            "undelivered_events": len(self._events),
            "plan_rows": sum(group.plan.num_rows for group in self.groups.groups),
        }

    def check_integrity(self) -> None:
        """Checks pools, plans and, when nothing is alive, that nothing is held.

        Raises:
            CorruptionError: a pool contradicts itself.
            InvalidPlanError: a plan contradicts itself.
            RuntimeError: pages or slots are held by no sequence.
        """
        self.groups.check_integrity(num_rows=len(self._decoding), is_idle=not self.has_work)

    # composing a step

    def _drop_complete_rows(self) -> None:
        """Takes out of the batch whose last token is in flight already."""
        for sequence in [row for row in self._decoding if row.num_tokens_to_schedule <= 0]:
            self._decoding.remove(sequence)
            self.groups.leave_batch(sequence)

    def _admit(self) -> None:
        while (head := self._waiting.head) is not None:
            active = self._prefilling + self._decoding
            if len(active) >= self.config.max_batch_size:
                return
            prefix = self.groups.find_prefix(head)
            if not can_admit(head, prefix, active, self.groups):
                return
            if not active and self._in_flight:
                return  # its pages may be those that the step in flight gives back
            self._waiting.pop()
            head.status = SequenceStatus.PREFILL
            self.groups.open_tables(head, prefix)
            if head.num_preemptions == 0:
                self._counters.num_prompt_tokens += head.num_prompt_tokens
                head.admitted_at, head.num_cached_tokens = self._clock(), head.num_computed_tokens
                if self.groups.prefix_cache is not None:
                    self.groups.prefix_cache.num_queries += head.num_prompt_tokens
                    self.groups.prefix_cache.num_hits += head.num_cached_tokens
            self._prefilling.append(head)
            self._prefilling.sort(key=lambda sequence: sequence.sequence_id)

    def _schedule_decode(self, step: Step) -> bool:
        """Gives every row of the batch room for its next token; False when a step in flight must be committed first."""
        if any(row.num_in_flight_tokens and row.request.sampling.needs_history for row in self._decoding):
            return False
        self.groups.retire_heads(self._prefilling, self._in_flight.newest)
        has_newcomers = any(sequence.num_prefill_tokens == 0 for sequence in self._prefilling)
        is_steady = not has_newcomers and self.groups.try_advance(self._decoding)
        if not is_steady and not self._advance_with_pages(step):
            return False
        for sequence in self._decoding:
            step.add_row(sequence)
        return True

    def _advance_with_pages(self, step: Step) -> bool:
        """Takes room for a token of every row and newcomer; False as `_schedule_decode`."""
        self.groups.retire_heads_at_page_end(self._decoding, self._in_flight.newest)
        while True:
            newcomers = [sequence for sequence in self._prefilling if sequence.num_prefill_tokens == 0]
            if self.groups.make_room_for_rows(self._decoding + newcomers):
                break
            if self._in_flight:
                return False
            self._give_way()
        self.groups.advance(self._decoding, newcomers, step)
        for sequence in newcomers:
            self._prefilling.remove(sequence)
            sequence.status = SequenceStatus.DECODE
            self._decoding.append(sequence)
        return True

    def _schedule_prefill(self, step: Step) -> bool:
        """Fills the step's chunk budget with what pages allow; False when a step in flight must be committed first."""
        while self._prefilling:
            budget = self.config.prefill_budget(len(step.decode))
            shares = split_budget([sequence.num_prefill_tokens for sequence in self._prefilling], budget)
            for sequence, share in zip(self._prefilling, shares, strict=True):
                num_tokens = self.groups.max_append(sequence, share)
                if num_tokens:
                    self.groups.append_chunk(sequence, num_tokens, step)
                    step.add_chunk(sequence, num_tokens)
            if step.prefill or step.decode:
                return True
            if self._in_flight:
                return False
            # Each prompt waits for pages that another holds, and no row is running that would give some back.
            self._give_way()
        return True

    def _give_way(self) -> None:
        """Frees pages when they are short and no step is in flight: preempts the least-progressed sequence."""
        active = self._prefilling + self._decoding
        holders = [sequence for sequence in active if any(table.num_pages for table in sequence.tables)] or active
        victim = choose_victim(holders)
        if len(holders) == 1:
            # Admission clamps every request to the pool, so this one met pages that nobody here holds.
            needed = self.groups.pages_needed((victim,), 1)
            error = RuntimeError(
                f"pages run out for a sequence that is alone: needs {needed}, free {self.groups.num_free()}"
            )
            if victim.num_generated_tokens:
                return self.finish(victim, FinishReason.LENGTH)
            return self.finish(victim, FinishReason.ERROR, error=error)
        self._leave(victim, PlanCause.PREEMPT)
        self._release(victim)
        victim.status = SequenceStatus.WAITING
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self._waiting.push(victim)
        self._counters.num_preemptions += 1

    # leaving

    def _leave(self, sequence: Sequence, cause: PlanCause = PlanCause.RETIRE) -> None:
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is SequenceStatus.PREFILL:
            self._prefilling.remove(sequence)
        elif sequence in self._decoding:
            self._decoding.remove(sequence)
            self.groups.leave_batch(sequence, cause)

    def _release(self, sequence: Sequence) -> None:
        self.groups.release(sequence)
        if sequence.last_step is not None:
            self._released.append(sequence.sequence_id)
            sequence.last_step = None  # steps name their sequences: without this both would wait for the collector

    def _retire(self, step: Step) -> None:
        for sequence in self._in_flight.retire(step):
            self._release(sequence)

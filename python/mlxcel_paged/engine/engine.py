"""The engine: one thread that loads the model and owns every MLX call, and the door to it for all other threads.

A request goes in by `submit` and comes back as events, called on the engine's thread, of which exactly one is the
last. That holds whatever happens: a step that raises ends its own requests with the error and the engine goes on; if
the thread itself cannot go on, the state turns to `failed` for good and every request that is alive is answered.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine.core import EngineCore, EngineModel
from mlxcel_paged.engine.errors import EngineFailedError, EngineNotReadyError
from mlxcel_paged.engine.mlx_thread import run_on_mlx_thread, stop_at_exit
from mlxcel_paged.engine.queue_limits import QueueLimits
from mlxcel_paged.engine.stats import CoreStats, EngineState, EngineStats, engine_stats
from mlxcel_paged.engine.step_loop import StepLoop
from mlxcel_paged.engine.step_times import StepTimes
from mlxcel_paged.engine.watchdog import Watchdog
from mlxcel_paged.errors import PagedError
from mlxcel_paged.request import FinishReason, InvalidRequestError, Request, TokenEvent
from mlxcel_paged.scheduler.plan_log import PlanEvent

logger = logging.getLogger("mlxcel_paged")

OnEvent = Callable[[TokenEvent], None]


class Engine:
    """Runs requests on one model.

    Args:
        config: what to load and how to run it.
        build: makes the core on the engine's thread; tests give their own.
        max_queued_requests: requests that may wait for a place; None is no bound.
        max_queued_tokens: prompt tokens of the requests that wait; None is no bound.
        step_timeout_s: a step that runs longer is reported, and makes `is_stalled`; None watches nothing.
        log_plan: keep the last changes of the decode plans for `plan_events`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        build: Callable[[EngineConfig], EngineCore] | None = None,
        max_queued_requests: int | None = 256,
        max_queued_tokens: int | None = None,
        step_timeout_s: float | None = None,
        log_plan: bool = False,
    ) -> None:
        self.config = config
        self._build = build
        self._queue_limits = QueueLimits(max_queued_requests, max_queued_tokens)
        self._wake = threading.Condition()
        # Guarded by _wake:
        self._state = EngineState.LOADING
        self._failure: BaseException | None = None
        self._core: EngineCore | None = None
        self._listeners: dict[str, OnEvent] = {}
        self._inbox: deque[Request | tuple[str, FinishReason]] = deque()
        self._num_inbox_requests = 0
        self._num_inbox_tokens = 0
        self._stopping: bool | None = None  # None: no; True: drain first; False: abort first
        self._last_stats = CoreStats()
        # Written by the engine's thread alone:
        self._times = StepTimes()
        self._memory_bytes: Mapping[str, int] = {}
        self._thread_ident: int | None = None
        self._ended: threading.Event | None = None  # None before start
        self._log_plan = log_plan
        self._watchdog = Watchdog(self._times, step_timeout_s, lambda: self._thread_ident)

    # any thread

    def start(self) -> None:
        """Starts loading and returns; `wait_until_ready` waits for the outcome.

        Raises:
            RuntimeError: it was started or stopped before.
        """
        if self._ended is not None or self._state is not EngineState.LOADING:
            raise RuntimeError("an engine starts once")
        if self._build is None:
            from mlxcel_paged import blas

            blas.prepare()  # before the first import of MLX, which is the next line
            from mlxcel_paged.engine.build import build_core

            self._build = build_core
        stop_at_exit(self)
        self._ended = run_on_mlx_thread(self._run)

    def wait_until_ready(self, timeout_s: float | None = None) -> EngineModel:
        """Waits until the model is loaded and checked.

        Raises:
            TimeoutError: it is not after `timeout_s` seconds.
            EngineFailedError: it could not be loaded; the cause is attached.
            EngineNotReadyError: the engine was stopped.
        """
        with self._wake:
            if not self._wake.wait_for(lambda: self._state is not EngineState.LOADING, timeout_s):
                raise TimeoutError(f"the model is not loaded after {timeout_s} s")
        return self.model

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def failure(self) -> BaseException | None:
        """Why the state is `failed`."""
        return self._failure

    @property
    def model(self) -> EngineModel:
        """The loaded model.

        Raises:
            EngineNotReadyError: it is not loaded, or the engine was stopped.
            EngineFailedError: the engine failed.
        """
        with self._wake:
            return self._ready_core().model

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queues one request; see `submit_many`."""
        self.submit_many((request,), on_event)

    def submit_many(self, requests: Iterable[Request], on_event: OnEvent) -> None:
        """Queues all of the requests, or none; max_tokens of each is clamped to what the context and the pool hold.

        `on_event` is called in order on the engine's thread and must return at once; the last event of every request
        has a finish reason. If it raises, the request is aborted.

        Raises:
            InvalidRequestError: one can never be served (ContextLengthExceededError: its prompt is too long), or one of
                that name is alive.
            QueueFullError: they and those that wait are more than may wait.
            EngineNotReadyError: the model is not loaded yet, or the engine is stopping.
            EngineFailedError: the engine failed.
        """
        batch = list(requests)
        with self._wake:
            scheduler = self._ready_core().scheduler
        for request in batch:
            scheduler.check(request)
        num_tokens = sum(len(request.prompt_token_ids) for request in batch)
        with self._wake:
            self._ready_core()
            if self._stopping is not None:
                raise EngineNotReadyError("the engine is stopping")
            names = [request.request_id for request in batch]
            for index, name in enumerate(names):
                if name in self._listeners or name in names[:index]:
                    raise InvalidRequestError("request_id", name, "unique among the requests that are alive")
            self._queue_limits.check(
                num_new=len(batch),
                num_new_tokens=num_tokens,
                num_queued=scheduler.num_waiting + self._num_inbox_requests,
                num_queued_tokens=scheduler.num_waiting_tokens + self._num_inbox_tokens,
                num_free_places=scheduler.num_free_places,
            )
            self._listeners.update(dict.fromkeys(names, on_event))
            self._inbox.extend(batch)
            self._num_inbox_requests += len(batch)
            self._num_inbox_tokens += num_tokens
            self._wake.notify_all()

    @property
    def queue_room(self) -> int | None:
        """Requests that `submit_many` would take now; None is no bound.

        A server asks before it tokenizes: a refusal then costs next to nothing.
        """
        with self._wake:
            if self._core is None:
                return None
            scheduler = self._core.scheduler
            num_queued = scheduler.num_waiting + self._num_inbox_requests
            return self._queue_limits.room(num_queued, scheduler.num_free_places)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Withdraws a request; one that is not alive is ignored. Its pages are free within a step.

        Args:
            reason: what its last event says; STOP when the caller found a stop string.
        """
        with self._wake:
            if request_id in self._listeners:
                self._inbox.append((request_id, reason))
                self._wake.notify_all()

    @property
    def is_stalled(self) -> bool:
        """Whether the present step has run beyond the step timeout."""
        return self._watchdog.is_stalled

    def plan_events(self) -> list[PlanEvent]:
        """The last changes of the decode plans, oldest first; empty unless `log_plan` was asked for."""
        with self._wake:
            return [] if self._core is None else self._core.scheduler.plan_log.events()

    def counts(self) -> dict[str, int]:
        """What requests have left here; all 0 when nothing is alive."""
        with self._wake:
            counts = {"listeners": len(self._listeners), "inbox": len(self._inbox)}
            return counts if self._core is None else counts | self._core.scheduler.counts()

    def stats(self) -> EngineStats:
        """Returns a snapshot."""
        with self._wake:
            core, last_stats = self._core, self._last_stats
            state, num_inbox_requests, num_inbox_tokens = self._state, self._num_inbox_requests, self._num_inbox_tokens
        return engine_stats(
            last_stats if core is None else core.stats(),
            self._times,
            state=state,
            num_inbox_requests=num_inbox_requests,
            num_inbox_tokens=num_inbox_tokens,
            memory_bytes=self._memory_bytes,
            is_stalled=self.is_stalled,
        )

    def stop(self, *, drain: bool = False, timeout_s: float | None = None) -> bool:
        """Refuses new requests, ends those that are alive and waits for the thread.

        Args:
            drain: let requests run to their end; else they are aborted.
            timeout_s: seconds to wait; None waits for ever.

        Returns:
            Whether the thread has ended.
        """
        with self._wake:
            # A second call may only be more impatient than the first.
            self._stopping = drain if self._stopping is None else self._stopping and drain
            self._wake.notify_all()
        if self._ended is None:
            self._close(EngineState.STOPPED, None)
            return True
        if self._thread_ident == threading.get_ident():
            return False
        return self._ended.wait(timeout_s)

    def _ready_core(self) -> EngineCore:
        if self._state is EngineState.FAILED:
            raise EngineFailedError(str(self._failure)) from self._failure
        if self._core is None or self._state is not EngineState.READY:
            raise EngineNotReadyError(f"the engine is {self._state}")
        return self._core

    # the engine's thread

    def _run(self) -> None:
        self._thread_ident = threading.get_ident()
        try:
            assert self._build is not None
            core = self._build(self.config)
            if self._log_plan:
                core.scheduler.plan_log.enable()
            self._memory_bytes = core.memory_bytes()
            with self._wake:
                self._core = core
                self._state = EngineState.READY
                self._wake.notify_all()
            self._watchdog.start()
            self._loop(core)
            del core
        except BaseException as error:
            # What is wrong with a model or a setting is told by whoever waits for the engine.
            is_expected = self._core is None and isinstance(error, PagedError | ValueError)
            logger.log(logging.DEBUG if is_expected else logging.CRITICAL, "the engine failed", exc_info=error)
            # The traceback would keep the model and its pages alive for as long as the engine is.
            self._close(EngineState.FAILED, error.with_traceback(None))
        else:
            self._close(EngineState.STOPPED, None)

    def _loop(self, core: EngineCore) -> None:
        loop = StepLoop(core, lambda events: self._deliver(core, events), self._times)
        while self._take_inbox(core):
            loop.turn()
            self._memory_bytes = core.memory_bytes()

    def _take_inbox(self, core: EngineCore) -> bool:
        """Applies what other threads asked for, waiting for it when there is nothing to do; False when it is over."""
        scheduler = core.scheduler
        with self._wake:
            if not scheduler.has_work:
                self._wake.wait_for(lambda: self._inbox or self._stopping is not None)
            commands = list(self._inbox)
            self._inbox.clear()
            stopping = self._stopping
        for command in commands:
            if isinstance(command, Request):
                self._add(core, command)
            else:
                scheduler.abort(*command)
        if stopping is False:
            scheduler.finish_all(FinishReason.ABORT)
        self._deliver(core, scheduler.take_events())
        return stopping is None or scheduler.has_work

    def _add(self, core: EngineCore, request: Request) -> None:
        try:
            core.scheduler.add(request)
        except Exception as error:
            logger.exception("a request that was checked cannot be added")
            self._answer(core, TokenEvent(request.request_id, None, FinishReason.ERROR, error.with_traceback(None)))
        with self._wake:  # from now on the scheduler counts it
            self._num_inbox_requests -= 1
            self._num_inbox_tokens -= len(request.prompt_token_ids)

    def _deliver(self, core: EngineCore, events: list[TokenEvent]) -> None:
        """Hands out events and lets the runner forget the sequences that ended."""
        while events:
            for event in events:
                self._answer(core, event)
            events = core.scheduler.take_events()  # a listener that raised has aborted its request
        released = core.scheduler.take_released()
        if released:
            core.runner.release(released)

    def _answer(self, core: EngineCore, event: TokenEvent) -> None:
        on_event = self._listeners.get(event.request_id)
        if event.finish_reason is not None:
            self._forget(event.request_id)
        if on_event is None:
            return
        try:
            on_event(event)
        except Exception:
            logger.exception("the listener of request %s raised", event.request_id)
            self._forget(event.request_id)
            core.scheduler.abort(event.request_id)

    def _forget(self, request_id: str) -> None:
        with self._wake:
            self._listeners.pop(request_id, None)

    def _close(self, state: EngineState, error: BaseException | None) -> None:
        """Ends the engine for good: first the state that refuses requests, then an answer for every one alive."""
        self._watchdog.stop()
        with self._wake:
            if self._core is not None:
                # Counters stay readable; what was held is given back with the core.
                self._last_stats = self._core.stats().without_holdings()
            self._state, self._failure, self._core = state, error, None
            listeners, self._listeners = self._listeners, {}
            self._inbox.clear()
            self._num_inbox_requests = self._num_inbox_tokens = 0
            self._times.end()
            self._wake.notify_all()
        for request_id, on_event in listeners.items():
            if error is None:
                event = TokenEvent(request_id, None, FinishReason.ABORT)
            else:
                event = TokenEvent(request_id, None, FinishReason.ERROR, EngineFailedError(str(error)))
            try:
                on_event(event)
            except Exception:
                logger.exception("the listener of request %s raised", request_id)

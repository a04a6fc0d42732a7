"""An engine without a model: it answers every prompt with the prompt's own tokens, step by step, in its own thread.

Pages are counted as a real engine would, steps can be slowed, held or made to fail, and every request is recorded.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

from mlxcel_paged.engine.errors import EngineFailedError, EngineNotReadyError
from mlxcel_paged.engine.kv_stats import KVCacheStats, KVGroupStats
from mlxcel_paged.request import (
    ContextLengthExceededError,
    FinishReason,
    InvalidRequestError,
    QueueFullError,
    Request,
    TokenEvent,
    TokenLogprobs,
)
from text.byte_tokenizer import byte_tokenizer

OnEvent = Callable[[TokenEvent], None]
PAGE_SIZE = 16


@dataclass
class Running:
    request: Request
    on_event: OnEvent
    max_tokens: int
    num_generated: int = 0


@dataclass
class ScriptedEngine:
    """See the module. A prompt that ends in the end-of-sequence token is finished by it, others by repetition."""

    parallel: int = 4
    max_context: int = 512
    max_pool_tokens: int = 4096
    max_waiting: int = 1 << 30
    state: str = "ready"
    step_s: float = 0.0
    tokenizer: object = field(default_factory=byte_tokenizer)
    num_submitted: int = 0
    num_aborts: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0
    decode_launches: dict[str, int] = field(default_factory=dict)
    failure: BaseException | None = None
    is_stalled: bool = False

    def __post_init__(self) -> None:
        self.model = SimpleNamespace(
            name="scripted/echo",
            tokenizer=self.tokenizer,
            vocab_size=len(self.tokenizer),
            max_context=self.max_context,
            device="cpu",
            storage=SimpleNamespace(storage="paged", max_batch=self.parallel, reason="scripted"),
        )
        self.last_requests: deque[Request] = deque(maxlen=256)
        self._running: dict[str, Running] = {}
        self._waiting: dict[str, Running] = {}
        self._condition = threading.Condition()
        self._step_error: Exception | None = None
        self._is_held = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # the protocol

    def start(self) -> None:
        pass

    def submit(self, request: Request, on_event: OnEvent) -> None:
        self.submit_many([request], on_event)

    def submit_many(self, requests: list[Request], on_event: OnEvent) -> None:
        with self._condition:
            if self.state != "ready":
                raise EngineNotReadyError(f"the engine is {self.state}")
            limit = min(self.max_context, self.max_pool_tokens)
            for request in requests:
                num_prompt_tokens, wanted = len(request.prompt_token_ids), request.sampling.max_tokens
                if num_prompt_tokens + (wanted != 0) > limit:
                    raise ContextLengthExceededError(num_prompt_tokens, limit, f"the context of {limit} tokens")
                if max(request.prompt_token_ids) >= self.model.vocab_size:
                    raise InvalidRequestError("prompt", request.prompt_token_ids, "in range")
                if any(token_id >= self.model.vocab_size for token_id, _ in request.sampling.logit_bias):
                    raise InvalidRequestError("logit_bias", request.sampling.logit_bias, "in range")
            if len(requests) > self.max_waiting - len(self._waiting):
                raise QueueFullError(len(self._waiting))
            for request in requests:
                room, wanted = limit - len(request.prompt_token_ids), request.sampling.max_tokens
                max_tokens = room if wanted is None else min(wanted, room)
                self.num_submitted += 1
                self.last_requests.append(request)
                self._waiting[request.request_id] = Running(request, on_event, max_tokens)
            self._condition.notify_all()

    @property
    def queue_room(self) -> int | None:
        with self._condition:
            return self.max_waiting - len(self._waiting)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        with self._condition:
            self.num_aborts += 1
            held = self._running.pop(request_id, None) or self._waiting.pop(request_id, None)
            self._condition.notify_all()
        if held is not None:
            held.on_event(TokenEvent(request_id, finish_reason=reason))

    def stats(self) -> SimpleNamespace:
        with self._condition:
            num_used = sum(-(-self._length(running) // PAGE_SIZE) for running in self._running.values())
            num_pages = self.max_pool_tokens // PAGE_SIZE
            group = KVGroupStats(num_pages, num_used, 0, num_pages - num_used, 0, num_used)
            return SimpleNamespace(
                num_requests_running=len(self._running),
                num_requests_waiting=len(self._waiting),
                num_queued_tokens=sum(len(waiting.request.prompt_token_ids) for waiting in self._waiting.values()),
                kv=KVCacheStats(1 << 20, True, 1 << 10, 1 << 19, (group,), 0, 0, 0),
                kv_pages_used=num_used,
                num_preemptions=0,
                num_prefilled_tokens=0,
                num_steps=self.num_steps,
                num_failed_steps=self.num_failed_steps,
                num_stalled_steps=0,
                decode_launches=dict(self.decode_launches),
                prefill_launches={},
                plan_changes={"admit": self.num_submitted},
                memory_bytes={"active": 7, "cache": 0, "peak": 9},
                busy_s=0.0,
                model_s=0.0,
                step_age_s=0.0,
                oldest_wait_s=0.0,
            )

    def counts(self) -> dict[str, int]:
        return {"alive": self.num_alive}

    def plan_events(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(body=lambda: {"cause": "admit"})]

    def stop(self, *, timeout_s: float | None = None) -> bool:
        with self._condition:
            self._is_stopping = True
            self._condition.notify_all()
        self._thread.join(10 if timeout_s is None else timeout_s)
        return not self._thread.is_alive()

    # what tests do to it

    def hold(self) -> None:
        """No step runs until `go_on`."""
        with self._condition:
            self._is_held = True

    def go_on(self) -> None:
        with self._condition:
            self._is_held = False
            self._condition.notify_all()

    def fail_next_step(self, error: Exception) -> None:
        """The next step fails every request in it; the engine goes on."""
        with self._condition:
            self._step_error = error

    def die(self, error: BaseException) -> None:
        """Fails every request and serves none any more."""
        with self._condition:
            self.state, self.failure = "failed", error
            victims = [*self._running.values(), *self._waiting.values()]
            self._running.clear()
            self._waiting.clear()
        answer = EngineFailedError(str(error))
        for victim in victims:
            victim.on_event(TokenEvent(victim.request.request_id, finish_reason=FinishReason.ERROR, error=answer))

    @property
    def num_alive(self) -> int:
        with self._condition:
            return len(self._running) + len(self._waiting)

    # its thread

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._is_stopping or (not self._is_held and bool(self._running or self._waiting))
                )
                if self._is_stopping:
                    return
                if self.step_s:
                    self._condition.wait_for(lambda: self._is_stopping, timeout=self.step_s)
                for request_id in list(self._waiting)[: self.parallel - len(self._running)]:
                    self._running[request_id] = self._waiting.pop(request_id)
                self.num_steps += 1
                events = self._fail() if self._step_error is not None else self._decode()
            for on_event, event in events:
                on_event(event)

    def _fail(self) -> list[tuple[OnEvent, TokenEvent]]:
        error, self._step_error = self._step_error, None
        self.num_failed_steps += 1
        victims = list(self._running.values())
        self._running.clear()
        return [
            (victim.on_event, TokenEvent(victim.request.request_id, finish_reason=FinishReason.ERROR, error=error))
            for victim in victims
        ]

    def _decode(self) -> list[tuple[OnEvent, TokenEvent]]:
        events = []
        if self._running:
            self.decode_launches["fused"] = self.decode_launches.get("fused", 0) + 2
        for request_id, running in list(self._running.items()):
            token_id, reason = self._next(running)
            if reason is not None:
                del self._running[request_id]
            logprobs = self._logprobs(token_id, running.request.sampling.num_logprobs)
            events.append((running.on_event, TokenEvent(request_id, token_id, reason, logprobs=logprobs)))
        return events

    def _next(self, running: Running) -> tuple[int | None, FinishReason | None]:
        if running.max_tokens == 0:
            return None, FinishReason.LENGTH
        prompt, sampling = running.request.prompt_token_ids, running.request.sampling
        token_id = prompt[running.num_generated % len(prompt)]
        running.num_generated += 1
        self.num_tokens += 1
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {self.tokenizer.eos_token_id})
        if token_id in stops:
            return token_id, FinishReason.STOP
        return token_id, FinishReason.LENGTH if running.num_generated == running.max_tokens else None

    def _logprobs(self, token_id: int | None, num_top: int | None) -> TokenLogprobs | None:
        """A fixed distribution: the sampled token, then its successor, then tokens that are impossible."""
        if token_id is None or num_top is None:
            return None
        top = [(token_id, -0.25), ((token_id + 1) % self.model.vocab_size, -1.5)]
        top += [((token_id + number) % self.model.vocab_size, -math.inf) for number in range(2, num_top)]
        return TokenLogprobs(-0.25, tuple(top[:num_top]))

    @staticmethod
    def _length(running: Running) -> int:
        return len(running.request.prompt_token_ids) + running.num_generated

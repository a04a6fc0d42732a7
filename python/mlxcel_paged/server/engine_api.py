"""The part of an engine that the server sees. Tests put a scripted engine behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from mlxcel_paged.engine.kv_stats import KVCacheStats
from mlxcel_paged.request import FinishReason, Request, TokenEvent

LOADING, READY, FAILED = "loading", "ready", "failed"


class ServedStorage(Protocol):
    """Where decode keeps keys and values."""

    @property
    def storage(self) -> str:
        """`paged` or `dense`."""

    @property
    def max_batch(self) -> int:
        """Sequences that decode together at most."""

    @property
    def reason(self) -> str:
        """Why, as a clause."""


class ServedModel(Protocol):
    """What was loaded. It does not change while the engine is ready."""

    @property
    def name(self) -> str:
        """Name of the model in answers."""

    @property
    def tokenizer(self) -> Any:
        """A Hugging Face tokenizer or mlx-lm's TokenizerWrapper; the server is its only user."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have an embedding."""

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output of one request at most."""

    @property
    def device(self) -> str:
        """`cpu` or `gpu`."""

    @property
    def storage(self) -> ServedStorage:
        """How decode is stored, and why."""


class EngineStats(Protocol):
    """A consistent look at the engine, see `mlxcel_paged.engine.stats`. Counters never fall."""

    @property
    def num_requests_running(self) -> int: ...
    @property
    def num_requests_waiting(self) -> int: ...
    @property
    def num_queued_tokens(self) -> int: ...
    @property
    def kv(self) -> KVCacheStats: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_prefilled_tokens(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def num_failed_steps(self) -> int: ...
    @property
    def num_stalled_steps(self) -> int: ...
    @property
    def decode_launches(self) -> Mapping[str, int]: ...
    @property
    def prefill_launches(self) -> Mapping[str, int]: ...
    @property
    def plan_changes(self) -> Mapping[str, int]: ...
    @property
    def memory_bytes(self) -> Mapping[str, int]: ...
    @property
    def busy_s(self) -> float: ...
    @property
    def model_s(self) -> float: ...
    @property
    def step_age_s(self) -> float: ...
    @property
    def oldest_wait_s(self) -> float: ...


class PlanEvent(Protocol):
    """One change of a decode plan."""

    def body(self) -> dict[str, Any]:
        """The event as JSON members."""


class Engine(Protocol):
    """Runs requests. Every method may be called from any thread and returns at once."""

    @property
    def state(self) -> str:
        """`loading`, `ready` (loaded and self-checked), or for good `failed` or `stopped`."""

    @property
    def model(self) -> ServedModel:
        """The loaded model; only while `ready`."""

    def submit_many(self, requests: Iterable[Request], on_event: Callable[[TokenEvent], None]) -> None:
        """Queues all requests or none, max_tokens of each clamped to what the context and the pool hold.

        `on_event` is called in order from the engine's thread; the last event of a request has a finish reason.

        Raises:
            InvalidRequestError: one can never be served; with slug `context_length_exceeded` its prompt is too long.
            QueueFullError: not now.
            EngineNotReadyError, EngineFailedError: the state is not `ready`, or is about to change.
        """

    @property
    def queue_room(self) -> int | None:
        """Requests that `submit_many` would take now; None is no bound."""

    def abort(self, request_id: str, reason: FinishReason = ...) -> None:
        """Withdraws a request; one that is not alive is ignored. Its pages are free within a step.

        Args:
            reason: why; STOP for a stop string that was found.
        """

    @property
    def is_stalled(self) -> bool:
        """Whether a step runs beyond the step timeout."""

    def plan_events(self) -> Sequence[PlanEvent]:
        """The last changes of the decode plans, oldest first."""

    def counts(self) -> Mapping[str, int]:
        """What requests have left in the engine; all 0 when it is idle."""

    def stats(self) -> EngineStats: ...

"""What an engine's thread works with once the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxcel_paged.engine.memory import MemoryPlan
from mlxcel_paged.engine.runner import Runner
from mlxcel_paged.engine.stats import CoreStats
from mlxcel_paged.engine.storage import StorageChoice
from mlxcel_paged.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The loaded model as the rest of the program sees it; it does not change while the engine is ready.

    Attributes:
        name: name of the model in answers.
        tokenizer: mlx-lm's tokenizer wrapper.
        vocab_size: token ids that have an embedding.
        max_context: tokens of prompt and output of one request at most.
        device: `cpu` or `gpu`.
        storage: where decode keeps keys and values, and why.
        memory: pages and bytes; None with dense storage.
    """

    name: str
    tokenizer: Any
    vocab_size: int
    max_context: int
    device: str
    storage: StorageChoice
    memory: MemoryPlan | None


@dataclass(frozen=True, slots=True)
class EngineCore:
    """Scheduler and runner over one model.

    Attributes:
        memory_bytes: what MLX holds, by kind; called on the thread that owns it.
    """

    model: EngineModel
    scheduler: Scheduler
    runner: Runner
    memory_bytes: Callable[[], Mapping[str, int]] = dict

    def stats(self) -> CoreStats:
        """A snapshot; any thread may call it."""
        changes = {str(cause): count for cause, count in self.scheduler.plan_log.counts.items()}
        return CoreStats(
            self.scheduler.stats(),
            self.model.memory,
            self.runner.outcomes(),
            self.runner.prefill_outcomes(),
            changes,
        )

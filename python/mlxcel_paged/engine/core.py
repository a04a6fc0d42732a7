"""What an engine's thread works with once the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxcel_paged.engine.memory import MemoryPlan
from mlxcel_paged.engine.runner import Runner
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
    """Scheduler and runner over one model."""

    model: EngineModel
    scheduler: Scheduler
    runner: Runner

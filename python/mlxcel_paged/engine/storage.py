"""Paged or dense storage for decode: decided once per engine, with the reason on record. No engine is needed to ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.errors import UnsupportedModelError

Storage = Literal["paged", "dense"]


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """Where decode keeps keys and values.

    Attributes:
        storage: `paged` or `dense`.
        max_batch: sequences that decode together; 1 when the model's own caches cannot be batched.
        reason: why, as a clause.
    """

    storage: Storage
    max_batch: int
    reason: str


def choose_storage(config: EngineConfig, *, cannot_page: str | None, cannot_batch: str | None) -> StorageChoice:
    """Applies `--decode-storage`, `--parallel` and `--no-batch` to what the model can do.

    Args:
        config: what was asked for.
        cannot_page: why some attention layer cannot be paged, or None.
        cannot_batch: why the model's own caches cannot hold several sequences, or None.

    Raises:
        UnsupportedModelError: paged storage was asked for and the model cannot have it.
    """
    dense_batch = config.max_batch if cannot_batch is None else 1
    dense_note = "" if dense_batch == config.max_batch else f"; one sequence at a time: {cannot_batch}"
    if config.decode_storage == "dense":
        return StorageChoice("dense", dense_batch, f"asked for{dense_note}")
    if config.decode_storage == "paged":
        if cannot_page is not None:
            raise UnsupportedModelError(f"{cannot_page} (hint: --decode-storage dense)")
        return StorageChoice("paged", config.max_batch, "asked for")
    if cannot_page is not None:
        return StorageChoice("dense", dense_batch, f"{cannot_page}{dense_note}")
    if config.max_batch == 1:
        return StorageChoice("dense", 1, "one sequence at a time has nothing to share a batch with")
    return StorageChoice("paged", config.max_batch, "several sequences are batched and every attention layer is paged")


def storage_for_model(config: EngineConfig, model: object, *, on_cpu: bool) -> StorageChoice:
    """Chooses for a loaded mlx-lm model. Runs on the thread that owns MLX.

    Args:
        config: what was asked for.
        model: the model.
        on_cpu: whether it runs on the CPU, whose page writes take certain head dims alone.

    Raises:
        UnsupportedModelError: paged storage was asked for and the model cannot have it.
    """
    from mlxcel_paged.attention.page_write import why_not_written_on_cpu
    from mlxcel_paged.models.dense_model import why_one_sequence
    from mlxcel_paged.models.kv_groups import kv_layout

    cannot_page = None
    try:
        layout = kv_layout(model)
        if on_cpu:
            cannot_page = why_not_written_on_cpu(layout)
    except UnsupportedModelError as error:
        cannot_page = str(error)
    return choose_storage(config, cannot_page=cannot_page, cannot_batch=why_one_sequence(model))

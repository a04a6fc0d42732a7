"""Which storage a model gets, and that the reason says so."""

from __future__ import annotations

import pytest

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine.storage import StorageChoice, choose_storage
from mlxcel_paged.errors import UnsupportedModelError

NO_PAGES = "layer 3 keeps its state in a ArraysCache, which cannot be paged"
NO_BATCH = "ArraysCache holds one sequence"


def choose(cannot_page: str | None = None, cannot_batch: str | None = None, **config: object) -> StorageChoice:
    return choose_storage(EngineConfig(**config), cannot_page=cannot_page, cannot_batch=cannot_batch)  # type: ignore[arg-type]


def test_auto_is_paged_when_sequences_share_a_batch() -> None:
    choice = choose()
    assert (choice.storage, choice.max_batch) == ("paged", 4)


@pytest.mark.parametrize("config", [{"parallel": 1}, {"no_batch": True}])
def test_auto_is_dense_for_one_sequence_at_a_time(config: dict[str, object]) -> None:
    choice = choose(**config)
    assert (choice.storage, choice.max_batch) == ("dense", 1)
    assert "one sequence" in choice.reason


def test_auto_is_dense_when_a_layer_cannot_be_paged() -> None:
    assert choose(NO_PAGES) == StorageChoice("dense", 4, NO_PAGES)


def test_a_model_that_cannot_be_batched_runs_one_sequence_at_a_time() -> None:
    choice = choose(NO_PAGES, NO_BATCH)
    assert (choice.storage, choice.max_batch) == ("dense", 1)
    assert NO_PAGES in choice.reason
    assert NO_BATCH in choice.reason


def test_what_was_asked_for_is_done_or_refused() -> None:
    assert choose(decode_storage="dense").storage == "dense"
    assert choose(decode_storage="paged", parallel=1).storage == "paged"
    with pytest.raises(UnsupportedModelError, match=r"layer 3.*--decode-storage dense"):
        choose(NO_PAGES, decode_storage="paged")

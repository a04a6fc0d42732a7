"""mlx-lm's Gemma 2 cannot decode a padded batch; on dense storage its sequences run one at a time."""

from __future__ import annotations

from typing import Any

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine.storage import storage_for_model


class _Gemma2:
    """Looks like mlx-lm's class to whoever asks for its module."""

    def make_cache(self) -> list[Any]:
        return []


_Gemma2.__module__ = "mlx_lm.models.gemma2"


def test_dense_storage_of_gemma2_decodes_one_sequence_at_a_time() -> None:
    choice = storage_for_model(EngineConfig(decode_storage="dense", parallel=4), _Gemma2(), on_cpu=True)
    assert choice.max_batch == 1
    assert "gemma2" in choice.reason

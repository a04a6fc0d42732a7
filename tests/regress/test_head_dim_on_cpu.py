"""A head dim that the CPU's page writes do not take, as OpenLLaMA 3B's 100, is served on dense storage."""

from __future__ import annotations

import pytest
from mlx_lm.models import llama

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine.storage import storage_for_model
from mlxcel_paged.errors import UnsupportedModelError


def model_of(head_dim: int) -> llama.Model:
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=1,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            vocab_size=31,
        )
    )


@pytest.mark.parametrize("head_dim", [40, 100, 528])
def test_auto_is_dense_and_says_why(head_dim: int) -> None:
    choice = storage_for_model(EngineConfig(), model_of(head_dim), on_cpu=True)
    assert (choice.storage, choice.max_batch) == ("dense", 4)
    assert f"head dim {head_dim}" in choice.reason


def test_paged_storage_is_refused_with_a_way_out() -> None:
    with pytest.raises(UnsupportedModelError, match=r"head dim 100.*--decode-storage dense"):
        storage_for_model(EngineConfig(decode_storage="paged"), model_of(100), on_cpu=True)


@pytest.mark.parametrize(("head_dim", "on_cpu"), [(48, True), (512, True), (100, False)])
def test_other_head_dims_and_gpus_are_paged(head_dim: int, on_cpu: bool) -> None:
    assert storage_for_model(EngineConfig(), model_of(head_dim), on_cpu=on_cpu).storage == "paged"

"""Prompts of gpt_oss came out wrong on the pages of a GPU: only who asks for pages gets them."""

from __future__ import annotations

import pytest
from mlx_lm.models import gpt_oss

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine.storage import storage_for_model


@pytest.fixture(scope="module")
def model() -> gpt_oss.Model:
    return gpt_oss.Model(
        gpt_oss.ModelArgs(
            model_type="gpt_oss",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            vocab_size=31,
            layer_types=["sliding_attention", "full_attention"],
        )
    )


def test_auto_is_dense_on_a_gpu_and_says_why(model: gpt_oss.Model) -> None:
    choice = storage_for_model(EngineConfig(), model, on_cpu=False)
    assert (choice.storage, choice.max_batch) == ("dense", 4)
    assert "sinks" in choice.reason
    assert "--decode-storage paged" in choice.reason


def test_who_asks_for_pages_gets_them(model: gpt_oss.Model) -> None:
    assert storage_for_model(EngineConfig(decode_storage="paged"), model, on_cpu=False).storage == "paged"


def test_the_cpu_is_not_concerned(model: gpt_oss.Model) -> None:
    assert storage_for_model(EngineConfig(), model, on_cpu=True).storage == "paged"

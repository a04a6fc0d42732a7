"""One replacement of mlx-lm's attention: idempotent, reversible, and loud where a model looks inside a handle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, gemma2, llama, qwen3
from mlx_lm.models.cache import make_prompt_cache
from tiny import tiny_model

from mlxcel_paged.attention.launch import attend
from mlxcel_paged.errors import UnsupportedModelError
from mlxcel_paged.kvcache.handle import HandleAccessError, KeyHandle
from mlxcel_paged.models import hook
from mlxcel_paged.models.kv_groups import kv_layout


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    hook.install()
    yield
    hook.install()


class _Step:
    """Stands for a pass; answers attention with the queries."""

    offset = 0

    def attend(self, handle: KeyHandle, queries: mx.array, **options: Any) -> mx.array:
        return queries


def handle() -> KeyHandle:
    return KeyHandle(0, _Step(), mx.zeros((1, 2, 1, 64)), mx.zeros((1, 2, 1, 64)))


def test_it_sits_in_base_and_in_every_loaded_model_module() -> None:
    for module in (base, llama, qwen3):
        assert module.scaled_dot_product_attention.__module__ == "mlxcel_paged.models.hook"


def test_installing_twice_and_uninstalling_once_gives_the_original_back() -> None:
    hook.install()
    hook.install()
    assert hook.is_installed()
    hook.uninstall()
    assert not hook.is_installed()
    for module in (base, llama, qwen3):
        assert module.scaled_dot_product_attention.__module__ == "mlx_lm.models.base"
    assert gemma2.Attention.__call__.__module__ == "mlx_lm.models.gemma2"


def test_the_models_own_cache_still_works_through_it() -> None:
    model = tiny_model("gemma2")
    tokens = mx.array([[3, 4, 5, 6]])
    through = model(tokens, cache=make_prompt_cache(model))
    hook.uninstall()
    assert mx.array_equal(through, model(tokens, cache=make_prompt_cache(model)))


@pytest.mark.parametrize("name", ["shape", "dtype", "astype", "T", "swapaxes"])
def test_a_handle_that_is_looked_into_fails_loudly(name: str) -> None:
    keys = handle()
    for which, part in (("keys", keys), ("values", keys.values)):
        with pytest.raises(HandleAccessError, match=rf"`{which}\.{name}`.*--decode-storage dense"):
            getattr(part, name)


def test_handles_do_not_compute() -> None:
    keys = handle()
    with pytest.raises(TypeError):
        mx.expand_dims(keys, 2)
    with pytest.raises(TypeError):
        keys + 1  # type: ignore[operator]


def test_values_of_another_update_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="different cache updates"):
        attend(mx.zeros((1, 4, 1, 64)), handle(), handle().values, scale=1.0, mask=None)


def test_a_mask_of_the_model_is_refused() -> None:
    keys = handle()
    with pytest.raises(UnsupportedModelError, match="mask"):
        attend(mx.zeros((1, 4, 1, 64)), keys, keys.values, scale=1.0, mask=mx.zeros((1, 1)))


def test_a_model_that_reshapes_keys_is_unsupported_with_the_reason() -> None:
    model = tiny_model("llama")

    class Reshaping(type(model.layers[0].self_attn)):  # type: ignore[misc]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            keys, _ = cache.update_and_fetch(mx.zeros((1, 2, 1, 64)), mx.zeros((1, 2, 1, 64)))
            return x + keys.shape[0]

    model.layers[1].self_attn.__class__ = Reshaping
    with pytest.raises(UnsupportedModelError, match=r"keys\.shape"):
        kv_layout(model)

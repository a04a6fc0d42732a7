"""RoPE that moves into the launch: which models it is taken from, what it leaves alone, and what it refuses.

The kernels are doubles, here in float32 too, so that every family is compared with its own cache.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cuda_double import KernelsDouble
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from tiny import FAMILIES, VARIANTS, loaded_tiny, tiny_model

from mlxcel_paged.attention import dispatch
from mlxcel_paged.kernels_cuda.variant import RopeShape
from mlxcel_paged.kvcache.rotation import RotationError, Unrotated, begin_deferring, end_deferring
from mlxcel_paged.models.deferred_rope import defer_rope
from mlxcel_paged.models.kv_groups import kv_layout
from mlxcel_paged.models.loader import LoadedModel
from mlxcel_paged.models.paged_model import PagedModel
from mlxcel_paged.models.paged_rows import PagedRows

# They change queries, or copy the positions, on the way: Yarn's factor, a cast, a factor by position, a copy.
NOT_DEFERRED = ("gpt_oss", "cohere2", "ministral3", "gemma4_text")
PROMPTS = ([*range(3, 33)], [5, 6, 7], [9])
WHOLE = RopeShape(64, False)


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch.DTYPES, "cuda", (mx.float32, mx.float16, mx.bfloat16))


def on_doubles(loaded: LoadedModel, arm: Any = "auto") -> tuple[PagedModel, KernelsDouble]:
    kernels = KernelsDouble()
    options: dict[str, Any] = {"num_pages": 40, "page_size": 16, "max_slots": 4, "max_context": 128}
    paged = PagedModel(dataclasses.replace(loaded, device="gpu"), kernels=kernels, arm=arm, **options)
    kernels.page_double.register(paged.pools)
    return paged, kernels


def launches(kernels: KernelsDouble) -> dict[RopeShape | None, int]:
    """Decode launches, by the RoPE that they applied."""
    return {rope: double.num_launches for rope, double in kernels.decode_doubles.items() if double.num_launches}


def decoded(paged: PagedModel, num_steps: int = 10) -> list[mx.array]:
    """Logits of `PROMPTS`, each followed by the same tokens."""
    rows = PagedRows(paged)
    for prompt in PROMPTS:
        rows.add(prompt)
    num_rows = paged.launch_rows(len(PROMPTS))
    newest = [[prompt[-1] for prompt in PROMPTS], *([token, token + 1, token + 2] for token in range(num_steps))]
    steps = [rows.decode(step + [0] * (num_rows - len(step))) for step in newest]
    assert all(np.isfinite(np.array(step)).all() for step in steps), "a row, perhaps of padding, is not finite"
    rows.close()
    return [step[: len(PROMPTS)] for step in steps]


def own_cache(model: nn.Module, num_steps: int = 10) -> list[list[mx.array]]:
    found = []
    for row, prompt in enumerate(PROMPTS):
        caches = make_prompt_cache(model)
        if len(prompt) > 1:
            model(mx.array([prompt[:-1]]), cache=caches)
        tokens = [prompt[-1], *(token + row for token in range(num_steps))]
        found.append([model(mx.array([[token]]), cache=caches)[0, -1] for token in tokens])
    mx.eval(found)
    return found


def largest_difference(steps: list[mx.array], wanted: list[list[mx.array]]) -> float:
    return max(
        float(mx.abs(steps[step][row] - want).max() / mx.abs(want).max())
        for row, of_row in enumerate(wanted)
        for step, want in enumerate(of_row)
    )


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_every_family_gives_the_logits_of_its_own_cache(family: str) -> None:
    loaded = loaded_tiny(family)
    wanted = own_cache(loaded.model)
    paged, kernels = on_doubles(loaded)
    assert largest_difference(decoded(paged), wanted) <= 2e-4
    applied = launches(kernels)
    if family in NOT_DEFERRED:
        assert set(applied) == {None}
    elif family in ("smollm3", "exaone4"):  # every other layer has no RoPE
        assert applied[WHOLE] == applied[None] == 11
    else:
        assert set(applied) == {RopeShape(32, True) if family == "glm4" else WHOLE}
        assert applied.popitem()[1] == 11 * (4 if family == "gemma3n" else 2)


def test_a_model_that_is_changed_and_turned_again_turns_by_its_new_angles() -> None:
    loaded = loaded_tiny("llama")
    on_doubles(loaded)
    for layer in loaded.model.layers:
        layer.self_attn.rope.base = 500.0
    wanted = own_cache(loaded.model)
    paged, kernels = on_doubles(loaded)
    assert largest_difference(decoded(paged), wanted) <= 2e-4
    assert set(launches(kernels)) == {WHOLE}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
SETTINGS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "base": (None, lambda rope: setattr(rope, "base", 500.0)),
    "scale": (None, lambda rope: setattr(rope, "scale", 0.25)),
    "dims": (None, lambda rope: setattr(rope, "dims", 32)),
    "traditional": (None, lambda rope: setattr(rope, "traditional", True)),
    "frequencies": (LLAMA3, lambda rope: setattr(rope, "_freqs", rope._freqs * 3)),
    "frequencies by an update": (LLAMA3, lambda rope: rope.update({"_freqs": rope._freqs * 3})),
    "frequencies by a union": (LLAMA3, lambda rope: rope.__ior__({"_freqs": rope._freqs * 3})),
    "factor": (YARN, lambda rope: setattr(rope, "mscale", 1.5)),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_set_on_a_live_model_holds_from_the_next_pass_on(setting: str) -> None:
    scaling, change = SETTINGS[setting]
    loaded = loaded_tiny("llama")
    ropes = [llama.initialize_rope(64, 10_000.0, False, scaling, 512) for _ in loaded.model.layers]
    for layer, rope in zip(loaded.model.layers, ropes, strict=True):
        layer.self_attn.rope = rope
    before = own_cache(loaded.model)
    paged, kernels = on_doubles(loaded)
    assert largest_difference(decoded(paged), before) <= 2e-4
    assert launches(kernels) == {WHOLE: 22}
    change(ropes[1])
    wanted = own_cache(loaded.model)
    assert largest_difference([mx.stack(rows) for rows in zip(*before, strict=True)], wanted) > 2e-3
    assert largest_difference(decoded(paged), wanted) <= 2e-4
    assert launches(kernels) == {WHOLE: 22 + 11, None: 11}
    on_doubles(loaded)
    assert isinstance(deferred(ropes[0]), Unrotated)


def test_what_does_not_turn_leaves_a_module_deferring() -> None:
    loaded = loaded_tiny("llama")
    on_doubles(loaded)
    loaded.model.train()
    loaded.model.eval()
    loaded.model.freeze()
    loaded.model.layers[0].self_attn.rope.note = "of no account"
    assert all(isinstance(deferred(layer.self_attn.rope), Unrotated) for layer in loaded.model.layers)


def test_a_rope_that_is_set_for_queries_alone_is_refused_by_name() -> None:
    loaded = loaded_tiny("llama")
    for layer in loaded.model.layers:
        layer.self_attn.__class__ = _attention(_by_two)
        layer.self_attn.other = nn.RoPE(64)
    paged, _ = on_doubles(loaded)
    loaded.model.layers[0].self_attn.rope.base = 500.0
    with pytest.raises(RotationError, match="different rotations"):
        decoded(paged)
    loaded.model.layers[0].self_attn.other.base = 500.0
    assert largest_difference(decoded(on_doubles(loaded)[0]), own_cache(loaded.model)) <= 2e-4


def deferred(rope: nn.Module) -> Any:
    """What `rope` makes of queries in a pass that may put it off."""
    offset = mx.array([3])
    begin_deferring(offset)
    try:
        return rope(mx.zeros((1, 4, 1, 64)), offset=offset)
    finally:
        end_deferring()


def test_a_model_is_left_as_it_is_to_everybody_else() -> None:
    """Its own cache and the gather arm get the same bits, before and after it is turned; both arms take turns."""
    loaded = loaded_tiny("llama")
    before = own_cache(loaded.model), decoded(on_doubles(loaded, "gather")[0])
    fused, kernels = on_doubles(loaded)
    gather, _ = on_doubles(loaded, "gather")
    rows = [PagedRows(paged) for paged in (fused, gather)]
    for side in rows:
        side.add(PROMPTS[0])
    for token in range(5):
        left, right = (side.decode([token]) for side in rows)
        assert float(mx.abs(left - right).max() / mx.abs(right).max()) <= 2e-4
    assert set(launches(kernels)) == {WHOLE}
    after = own_cache(loaded.model), decoded(on_doubles(loaded, "gather")[0])
    for left, right in zip(before[0], after[0], strict=True):
        assert all(mx.array_equal(one, other) for one, other in zip(left, right, strict=True))
    assert all(mx.array_equal(one, other) for one, other in zip(before[1], after[1], strict=True))


def test_the_switch_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXCEL_PAGED_STEP_FUSION", "0")
    loaded = loaded_tiny("llama")
    paged, kernels = on_doubles(loaded)
    assert largest_difference(decoded(paged), own_cache(loaded.model)) <= 2e-4
    assert set(launches(kernels)) == {None}
    assert {type(layer.self_attn.rope) for layer in loaded.model.layers} == {nn.RoPE}


def test_the_kill_switch_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_tiny("llama")
    wanted = own_cache(loaded.model)[1]
    paged, kernels = on_doubles(loaded)
    rows = PagedRows(paged)
    rows.add(PROMPTS[1])
    for step, token in enumerate([PROMPTS[1][-1], *(token + 1 for token in range(6))]):
        monkeypatch.setenv("MLXCEL_PAGED_ATTENTION_NATIVE", "0" if step in (2, 3) else "1")
        found = rows.decode([token])[0]
        assert float(mx.abs(found - wanted[step]).max() / mx.abs(wanted[step]).max()) <= 2e-4
    assert launches(kernels) == {WHOLE: 5 * 2}


def test_other_rope_classes() -> None:
    """Llama 3's frequencies and Yarn without a factor move too; Yarn with one does not, nor does a subclass."""
    scalings = {
        "llama3": LLAMA3,
        "linear": {"rope_type": "linear", "factor": 4.0},
        "yarn": YARN,
        "factor": {"rope_type": "yarn", "factor": 4.0},
        "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": 1.0,
                     "long_factor": 4.0},
    }  # fmt: skip
    moved = {}
    for name, scaling in scalings.items():
        loaded = loaded_tiny("llama")
        for layer in loaded.model.layers:
            layer.self_attn.rope = llama.initialize_rope(64, 10_000.0, False, scaling, 512)
        paged, kernels = on_doubles(loaded)
        assert largest_difference(decoded(paged), own_cache(loaded.model)) <= 2e-4, name
        moved[name] = set(launches(kernels)) == {WHOLE}
    assert moved == dict.fromkeys(scalings, False) | {"llama3": True, "linear": True, "yarn": True}


class _Subclass(nn.RoPE):  # type: ignore[misc]
    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        return super().__call__(x, offset) * 0.5


def _attention(change: Callable[..., tuple[Any, Any]]) -> type:
    """Llama's attention, with what `change(self, queries, keys, offset)` makes of queries and keys in place of RoPE."""

    class Attention(llama.Attention):  # type: ignore[misc]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            batch, num_tokens, _ = x.shape
            queries, keys, values = (
                product(x).reshape(batch, num_tokens, heads, -1).transpose(0, 2, 1, 3)
                for product, heads in (
                    (self.q_proj, self.n_heads),
                    (self.k_proj, self.n_kv_heads),
                    (self.v_proj, self.n_kv_heads),
                )
            )
            queries, keys = change(self, queries, keys, cache.offset)
            handles = cache.update_and_fetch(keys, values)
            out = llama.scaled_dot_product_attention(queries, *handles, cache=cache, scale=self.scale, mask=mask)
            return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, num_tokens, -1))

    return Attention


def _gated(self: Any, queries: mx.array, keys: mx.array, offset: Any) -> tuple[Any, Any]:
    queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
    self.gate = queries + 1.0  # nobody reads it, but it would be wrong
    return queries, keys


def _by_two(self: Any, queries: mx.array, keys: mx.array, offset: Any) -> tuple[Any, Any]:
    return self.rope(queries, offset=offset), self.other(keys, offset=offset)


CHANGES: dict[str, Callable[..., tuple[Any, Any]]] = {
    "queries are scaled": lambda self, q, k, offset: (self.rope(q, offset=offset) * 0.5, self.rope(k, offset=offset)),
    "keys are normed": lambda self, q, k, offset: (
        self.rope(q, offset=offset),
        mx.fast.rms_norm(self.rope(k, offset=offset), None, 1e-5),
    ),
    "queries alone": lambda self, q, k, offset: (self.rope(q, offset=offset), k),
    "keys alone": lambda self, q, k, offset: (q, self.rope(k, offset=offset)),
    "other positions": lambda self, q, k, offset: (self.rope(q, offset=offset + 1), self.rope(k, offset=offset + 1)),
    "one row's position": lambda self, q, k, offset: (self.rope(q, offset=3), self.rope(k, offset=3)),
    "twice": lambda self, q, k, offset: (
        self.rope(self.rope(q, offset=offset), offset=offset),
        self.rope(k, offset=offset),
    ),
    "used elsewhere": _gated,
    "inputs by name": lambda self, q, k, offset: (self.rope(x=q, offset=offset), self.rope(x=k, offset=offset)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_models_that_do_more_are_left_alone(change: str) -> None:
    loaded = loaded_tiny("llama")
    for layer in loaded.model.layers:
        layer.self_attn.__class__ = _attention(CHANGES[change])
    paged, kernels = on_doubles(loaded)
    assert largest_difference(decoded(paged), own_cache(loaded.model)) <= 2e-4
    assert set(launches(kernels)) == {None}
    assert {type(layer.self_attn.rope) for layer in loaded.model.layers} == {nn.RoPE}


def test_one_layer_that_does_more_leaves_the_others() -> None:
    loaded = loaded_tiny("llama")
    loaded.model.layers[1].self_attn.__class__ = _attention(CHANGES["queries are scaled"])
    paged, kernels = on_doubles(loaded)
    assert largest_difference(decoded(paged), own_cache(loaded.model)) <= 2e-4
    assert launches(kernels) == {WHOLE: 11, None: 11}


def test_queries_and_keys_of_different_ropes() -> None:
    """Two modules are as good as one if they turn alike, and not if they do not."""
    for base, rope in ((10_000.0, WHOLE), (5_000.0, None)):
        loaded = loaded_tiny("llama")
        for layer in loaded.model.layers:
            layer.self_attn.__class__ = _attention(_by_two)
            layer.self_attn.other = nn.RoPE(64, base=base)
        paged, kernels = on_doubles(loaded)
        assert largest_difference(decoded(paged), own_cache(loaded.model)) <= 2e-4
        assert set(launches(kernels)) == {rope}


def test_one_module_for_all_layers_and_ropes_that_differ_by_layer() -> None:
    for ropes in ([nn.RoPE(64)] * 2, [nn.RoPE(64, base=100.0), nn.RoPE(48, traditional=True, scale=0.5)]):
        loaded = loaded_tiny("llama")
        for layer, rope in zip(loaded.model.layers, ropes, strict=True):
            layer.self_attn.rope = rope
        paged, kernels = on_doubles(loaded)
        assert largest_difference(decoded(paged), own_cache(loaded.model)) <= 2e-4
        assert sum(launches(kernels).values()) == 22
        assert set(launches(kernels)) == {RopeShape(rope.dims, rope.traditional) for rope in ropes}


@pytest.mark.parametrize("rope", [nn.RoPE(40), _Subclass(64)], ids=["40 dims", "subclass"])
def test_ropes_that_the_kernel_does_not_know(rope: nn.Module) -> None:
    loaded = loaded_tiny("llama")
    for layer in loaded.model.layers:
        layer.self_attn.rope = rope
    paged, kernels = on_doubles(loaded)
    assert largest_difference(decoded(paged), own_cache(loaded.model)) <= 2e-4
    assert set(launches(kernels)) == {None}


def test_a_pass_that_fails_puts_nothing_off_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_tiny("llama")
    paged, kernels = on_doubles(loaded)
    rope = loaded.model.layers[0].self_attn.rope
    rows = PagedRows(paged)
    rows.add(PROMPTS[1])
    offsets: list[mx.array] = []

    def failing(self: Any, *_: Any, cache: Any) -> mx.array:
        offsets.append(cache[0].offset)
        assert isinstance(rope(mx.zeros((1, 4, 1, 64)), offset=offsets[0]), Unrotated)
        raise ArithmeticError("a layer fails")

    with monkeypatch.context() as patch:
        patch.setattr(type(loaded.model), "__call__", failing)
        with pytest.raises(ArithmeticError):
            rows.decode([1])
    assert isinstance(rope(mx.zeros((1, 4, 1, 64)), offset=offsets[0]), mx.array)
    assert not launches(kernels)


def test_another_thread_puts_nothing_off() -> None:
    model = tiny_model("llama")
    defer_rope(model, kv_layout(model))
    rope, offset = model.layers[0].self_attn.rope, mx.array([3])
    x = mx.zeros((1, 4, 1, 64))
    found: list[Any] = []
    begin_deferring(offset)
    try:
        assert isinstance(rope(x, offset=offset), Unrotated)
        assert isinstance(rope(x, offset=mx.array([3])), mx.array)
        assert isinstance(rope(x), mx.array)
        thread = threading.Thread(target=lambda: found.append(rope(x, offset=offset)))
        thread.start()
        thread.join()
    finally:
        end_deferring()
    assert isinstance(found[0], mx.array)


def test_turning_a_model_again_changes_nothing() -> None:
    model = tiny_model("gemma3_text")
    layout = kv_layout(model)
    first = defer_rope(model, layout)
    modules = [layer.self_attn.rope for layer in model.layers]
    classes = [type(module) for module in modules]
    assert defer_rope(model, layout) == first == [{WHOLE}, {WHOLE}]
    assert [type(module) for module in modules] == classes

"""A decode pass that is built and not evaluated: what a trace of it holds."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny import FAMILIES, tiny_model

from mlxcel_paged.models.decode_trace import ModuleCall, _watch, trace_decode


def ropes(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("rope")]


def test_calls_and_launches_share_their_objects() -> None:
    model = tiny_model("llama")
    watched = ropes(model)
    trace = trace_decode(model, 2, watched)
    assert [call.module for call in trace.calls] == [watched[0], watched[0], watched[1], watched[1]]
    for call in trace.calls:
        assert call.kwargs["offset"] is trace.offset
    for layer, attend in enumerate(trace.attends):
        queries, keys = trace.calls[2 * layer : 2 * layer + 2]
        assert attend.handle.layer == layer
        assert attend.queries is queries.result
        assert attend.handle.k_new is keys.result


def test_products_of_one_input_are_seen() -> None:
    model = tiny_model("llama")
    attention = model.layers[0].self_attn
    trace = trace_decode(model, 2, [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj])
    inputs = [call.args[0] for call in trace.calls]
    assert inputs[0] is inputs[1] is inputs[2]
    assert inputs[3] is not inputs[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_as_it_was(family: str) -> None:
    model = tiny_model(family)
    modules = [module for _, module in model.named_modules()]
    classes = [type(module) for module in modules]
    trace = trace_decode(model, len(make_prompt_cache(model)), modules[1:])
    assert [type(module) for module in modules] == classes
    assert trace.attends
    assert {id(call.module) for call in trace.calls} <= {id(module) for module in modules}


def test_a_pass_that_raises_leaves_the_model_as_it_was() -> None:
    class Faulty(nn.RoPE):  # type: ignore[misc]
        def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
            raise ArithmeticError("no rotation")

    model = tiny_model("llama")
    model.layers[1].self_attn.rope = Faulty(64)
    watched = ropes(model)
    classes = [type(module) for module in watched]
    with pytest.raises(ArithmeticError):
        trace_decode(model, 2, watched)
    assert [type(module) for module in watched] == classes


def test_a_call_may_outlast_the_trace() -> None:
    """As where another thread runs the model meanwhile."""

    class Ending(nn.Module):  # type: ignore[misc]
        def __call__(self) -> str:
            trace.close()
            return "done"

    module, calls = Ending(), list[ModuleCall]()
    trace = ExitStack()
    trace.enter_context(_watch([module], calls))
    assert module() == "done"
    assert type(module) is Ending
    assert calls == []

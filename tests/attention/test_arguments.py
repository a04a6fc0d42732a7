"""Bad arguments of `paged_decode` and `plan_from_csr` are typed errors that name the argument."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from problem import make_problem

from mlxcel_paged.attention.api import paged_decode
from mlxcel_paged.attention.plan_api import plan_from_csr
from mlxcel_paged.errors import BackendUnavailableError, InvalidArgumentError, InvalidTypeError, PagedError

VALUES: list[tuple[str, Any]] = [
    ("indptr", [1, 1, 3]),
    ("indptr", [0, 2, 1]),
    ("indptr", [0, 1]),
    ("indptr", [0, -1, 3]),
    ("indptr", []),
    ("indices", [0, 1, 99]),
    ("indices", [0, -1, 2]),
    ("indices", [0, 2**31, 2]),
    ("indices", [0, 2**70, 2]),
    ("indices", [0, 1]),
    ("last_page_len", [5, 0]),
    ("last_page_len", [5, 17]),
    ("last_page_len", [-1, 5]),
    ("last_page_len", [5]),
    ("first_page_offset", [5, 0]),
    ("first_page_offset", [0, 16]),
    ("first_page_offset", [-1, 0]),
    ("first_page_offset", [0]),
    ("window", 0),
    ("window", -3),
    ("logits_soft_cap", -1.0),
    ("logits_soft_cap", math.nan),
    ("logits_soft_cap", math.inf),
    ("sm_scale", math.nan),
    ("sm_scale", -math.inf),
    ("num_splits", 0),
    ("layout", "DNH"),
    ("layout", None),
    ("layout", np.array(["NHD", "HND"])),
    ("backend", "tpu"),
    ("backend", np.zeros(2)),
    ("sinks", mx.zeros((3,))),
    ("sinks", mx.zeros((4, 1))),
]
CSR_VALUES = [
    (argument, value)
    for argument, value in VALUES
    if argument in ("indptr", "indices", "last_page_len", "first_page_offset") and value != [0, 1]
]
TYPES: list[tuple[str, Any]] = [
    ("indptr", "abc"),
    ("indices", [0, 1.5, 2]),
    ("indices", [0, True, 2]),
    ("last_page_len", None),
    ("first_page_offset", np.zeros(2, np.int16)),
    ("window", 2.0),
    ("window", "3"),
    ("window", True),
    ("logits_soft_cap", "1"),
    ("logits_soft_cap", None),
    ("sm_scale", "x"),
    ("num_splits", 1.5),
    ("batch_invariant", 1),
    ("return_lse", None),
    ("sinks", [0.0] * 4),
    ("sinks", mx.zeros((4,), mx.int32)),
    ("sinks", mx.zeros((4,), mx.float16)),
]


def call(**changes: Any) -> Any:
    problem = make_problem(lengths=[5, 25])
    arguments = {"q": problem.q, "k_pages": problem.k_pages, "v_pages": problem.v_pages, **problem.arguments, **changes}
    return paged_decode(arguments.pop("q"), arguments.pop("k_pages"), arguments.pop("v_pages"), **arguments)


@pytest.mark.parametrize(("argument", "value"), VALUES, ids=lambda value: str(value)[:24])
def test_a_value_out_of_its_domain(argument: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=argument) as caught:
        call(**{argument: value})
    assert caught.value.argument == argument
    assert isinstance(caught.value, PagedError | ValueError)


@pytest.mark.parametrize(("argument", "value"), TYPES, ids=lambda value: str(value)[:24])
def test_a_type_that_cannot_be_used(argument: str, value: Any) -> None:
    with pytest.raises(InvalidTypeError, match=argument) as caught:
        call(**{argument: value})
    assert caught.value.argument == argument
    assert isinstance(caught.value, PagedError | TypeError)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("q", mx.zeros((2, 4, 32))),
        ("q", mx.zeros((2, 4, 64, 1))),
        ("q", mx.zeros((2, 0, 64))),
        ("k_pages", mx.zeros((6, 16, 2))),
        ("k_pages", mx.zeros((0, 16, 2, 64))),
        ("v_pages", mx.zeros((6, 16, 2, 32))),
        ("last_page_len", [5, 9, 1]),
    ],
    ids=lambda value: str(getattr(value, "shape", value)),
)
def test_shapes_that_do_not_fit(argument: str, value: Any) -> None:
    changes: dict[str, Any] = {argument: value}
    if argument == "k_pages" and value.ndim == 4:
        changes["v_pages"] = value
    with pytest.raises(InvalidArgumentError) as caught:
        call(**changes)
    assert caught.value.argument == argument


@pytest.mark.parametrize("argument", ["q", "k_pages", "v_pages"])
@pytest.mark.parametrize(
    "value",
    [np.zeros((6, 16, 2, 64)), mx.zeros((6, 16, 2, 64), mx.int32), [[1.0]], None],
    ids=["float64", "int32", "list", "none"],
)
def test_tensors_of_other_dtypes(argument: str, value: Any) -> None:
    with pytest.raises(InvalidTypeError) as caught:
        call(**{argument: value})
    assert caught.value.argument == argument


def test_keys_and_values_of_different_dtypes() -> None:
    problem = make_problem(lengths=[5, 25])
    with pytest.raises(InvalidTypeError) as caught:
        call(v_pages=problem.v_pages.astype(mx.float16))
    assert caught.value.argument == "v_pages"


@pytest.mark.parametrize("backend", ["auto", "cpu", "gather", "reference"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_every_backend_returns_mlx_arrays(backend: str, dtype: mx.Dtype) -> None:
    problem = make_problem(lengths=[5, 25, 0], dtype=dtype)
    tensors = (problem.q, problem.k_pages, problem.v_pages)
    out, lse = paged_decode(*tensors, **problem.arguments, backend=backend, return_lse=True)
    problem.check(out, lse)
    only = paged_decode(*tensors, **problem.arguments, backend=backend)
    assert isinstance(only, mx.array)
    problem.check(only, None)


@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_a_backend_of_other_hardware_is_unavailable(backend: str) -> None:
    with pytest.raises(BackendUnavailableError, match=backend):
        call(backend=backend)


def test_the_cpu_kernel_refuses_what_it_does_not_serve_and_auto_gathers() -> None:
    for shape, argument in (({"head_dim": 112}, "q"), ({"page_size": 4}, "k_pages"), ({"page_size": 256}, "k_pages")):
        problem = make_problem(lengths=[5, 25], **shape)
        tensors = (problem.q, problem.k_pages, problem.v_pages)
        with pytest.raises(InvalidArgumentError) as caught:
            paged_decode(*tensors, **problem.arguments, backend="cpu")
        assert caught.value.argument == argument
        problem.check(*paged_decode(*tensors, **problem.arguments, return_lse=True))


GEOMETRY = {"num_pages": 8, "page_size": 16, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}


@pytest.mark.parametrize("argument", list(GEOMETRY))
@pytest.mark.parametrize("value", [0, -1, 2**31, 1.5, "8", None, True])
def test_plan_geometry(argument: str, value: Any) -> None:
    with pytest.raises((InvalidArgumentError, InvalidTypeError)) as caught:
        plan_from_csr([0, 1], [3], [5], **{**GEOMETRY, argument: value})
    assert caught.value.argument == argument


@pytest.mark.parametrize(("argument", "value"), CSR_VALUES)
def test_plan_takes_the_same_csr_as_the_one_shot(argument: str, value: Any) -> None:
    csr: dict[str, Any] = {"indptr": [0, 1, 3], "indices": [2, 0, 1], "last_page_len": [5, 9], argument: value}
    with pytest.raises(InvalidArgumentError) as caught:
        plan_from_csr(**csr, **{**GEOMETRY, "num_pages": 6})
    assert caught.value.argument == argument

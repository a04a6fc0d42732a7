"""`paged_decode` agrees with the float64 oracle over the odd grid, whatever the unowned bytes hold."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import pytest
from pairwise import pairwise_cover
from problem import make_problem

from mlxcel_paged.attention.api import paged_decode

FACTORS: dict[str, list[Any]] = {
    "head_dim": [64, 80, 96, 128, 256],
    "group_size": list(range(1, 17)),
    "page_size": [8, 16, 32, 64, 128],
    "dtype": [mx.float32, mx.float16, mx.bfloat16],
    "layout": ["NHD", "HND"],
    "offset": [False, True],
    "window": [None, 1, 21],
    "logits_soft_cap": [0.0, 5.0],
    "sinks": [False, True],
    "poison": ["nan", "inf", "largest"],
    "num_splits": [None, 1, 3],
}
BACKENDS = ["cpu", "gather"]


def lengths_around(page_size: int) -> list[int]:
    return [0, 1, page_size - 1, page_size, 0, page_size + 1, 3 * page_size + 5]


def check(case: dict[str, Any], backend: str, seed: int) -> None:
    shape = {name: value for name, value in case.items() if name != "num_splits"}
    problem = make_problem(
        lengths=lengths_around(case["page_size"]),
        num_kv_heads=1 if case["group_size"] > 8 else 2,
        seed=seed,
        **shape,
    )
    out, lse = paged_decode(
        problem.q,
        problem.k_pages,
        problem.v_pages,
        **problem.arguments,
        backend=backend,
        num_splits=case["num_splits"],
        return_lse=True,
    )
    problem.check(out, lse)
    alone = paged_decode(problem.q, problem.k_pages, problem.v_pages, **problem.arguments, backend=backend)
    problem.check(alone, None)


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("mlx.core.") for value in case.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", pairwise_cover(FACTORS), ids=name_of)
def test_pairwise_cover(case: dict[str, Any], backend: str) -> None:
    check(case, backend, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim", FACTORS["head_dim"])
@pytest.mark.parametrize("page_size", FACTORS["page_size"])
@pytest.mark.parametrize("group_size", FACTORS["group_size"])
def test_full_product(backend: str, head_dim: int, page_size: int, group_size: int) -> None:
    """Every shape, dtype and layout; the options go round their own pairwise cover."""
    shape = {"head_dim": head_dim, "group_size": group_size, "page_size": page_size}
    options = pairwise_cover({name: FACTORS[name] for name in FACTORS if name not in (*shape, "dtype", "layout")})
    first = group_size + page_size + head_dim
    for place, (dtype, layout) in enumerate(itertools.product(FACTORS["dtype"], FACTORS["layout"])):
        option = options[(first + 5 * place) % len(options)]
        check({**shape, "dtype": dtype, "layout": layout, **option}, backend, seed=2 + place)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_long_rows_beside_short_ones(backend: str, dtype: mx.Dtype) -> None:
    problem = make_problem(lengths=[4096, 3, 16384, 0, 511], num_kv_heads=1, page_size=16, dtype=dtype)
    out, lse = paged_decode(
        problem.q, problem.k_pages, problem.v_pages, **problem.arguments, backend=backend, return_lse=True
    )
    problem.check(out, lse)

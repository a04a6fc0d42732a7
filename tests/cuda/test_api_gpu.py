"""`paged_decode` and plans with `backend="cuda"` on a real GPU against the float64 oracle. Skipped without a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

if not mx.cuda.is_available():
    pytest.skip("needs a CUDA GPU and MLX's CUDA backend", allow_module_level=True)

from pairwise import pairwise_cover
from problem import Problem, make_problem
from test_cuda_api import (  # noqa: F401 - what holds with doubles has to hold with the kernels
    test_a_page_given_without_an_advance_changes_nothing_yet,
    test_a_plan_of_no_rows,
    test_an_append_through_views_lands_in_the_pool,
    test_any_rhythm_of_advances_and_runs,
    test_arrays_of_any_place_and_strides_can_be_read,
    test_auto_takes_the_kernel,
    test_dtypes_that_the_kernel_does_not_serve,
    test_factors_at_the_ends_of_float32,
    test_pools_that_cannot_be_written_in_place_are_named_and_left_alone,
    test_runs_of_two_dtypes_take_turns,
    test_shapes_that_the_kernel_does_not_serve,
    test_the_appended_token_is_written_and_seen,
)
from test_grid import FACTORS, check, name_of

from mlxcel_paged.attention.api import paged_decode
from mlxcel_paged.attention.plan_api import DecodePlan, plan_from_csr

DTYPES = [mx.float16, mx.bfloat16]
SERVED = {**FACTORS, "dtype": DTYPES}


@pytest.mark.parametrize("case", pairwise_cover(SERVED), ids=name_of)
def test_pairwise_cover(case: dict[str, Any]) -> None:
    check(case, "cuda", seed=1)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", FACTORS["head_dim"])
@pytest.mark.parametrize("group_size", FACTORS["group_size"])
def test_full_product(head_dim: int, group_size: int) -> None:
    """Every shape, dtype and layout; the options go round their own pairwise cover."""
    shape = ("head_dim", "group_size", "page_size", "dtype", "layout")
    options = pairwise_cover({name: FACTORS[name] for name in FACTORS if name not in shape})
    place = head_dim + group_size
    for page_size in FACTORS["page_size"]:
        for dtype in DTYPES:
            for layout in FACTORS["layout"]:
                place += 5
                case = {
                    "head_dim": head_dim,
                    "group_size": group_size,
                    "page_size": page_size,
                    "dtype": dtype,
                    "layout": layout,
                    **options[place % len(options)],
                }
                check(case, "cuda", seed=place)


def decode(problem: Problem, **options: Any) -> tuple[mx.array, mx.array]:
    arguments = {**problem.arguments, "backend": "cuda", "return_lse": True, **options}
    out, lse = paged_decode(problem.q, problem.k_pages, problem.v_pages, **arguments)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"num_splits": 1}, {"num_splits": 3}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("poison", ["nan", "inf", "largest"])
def test_long_rows_beside_short_ones(dtype: mx.Dtype, options: dict[str, Any], poison: str) -> None:
    for changes in ({}, {"window": 1000, "offset": True}):
        problem = make_problem(lengths=[4096, 3, 16384, 0, 511], num_kv_heads=1, dtype=dtype, poison=poison, **changes)
        problem.check(*decode(problem, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_keys", [100.0, 3000.0])
def test_extreme_logits(dtype: mx.Dtype, scale_keys: float) -> None:
    for head_dim, sinks in ((64, False), (128, True)):
        problem = make_problem(
            lengths=[700, 1, 33, 0, 2500], head_dim=head_dim, dtype=dtype, scale_keys=scale_keys, sinks=sinks
        )
        problem.check(*decode(problem))


def test_a_row_has_the_same_bits_whatever_its_neighbours() -> None:
    problem = make_problem(lengths=[5000, 40, 0, 1500], head_dim=128, dtype=mx.float16)
    together, together_lse = decode(problem, batch_invariant=True)
    indptr, indices = problem.arguments["indptr"], problem.arguments["indices"]
    for row, (begin, end) in enumerate(pairwise(indptr.tolist())):
        out, lse = paged_decode(
            problem.q[row : row + 1],
            problem.k_pages,
            problem.v_pages,
            indptr=[0, end - begin],
            indices=indices[begin:end],
            last_page_len=problem.arguments["last_page_len"][row : row + 1],
            backend="cuda",
            batch_invariant=True,
            return_lse=True,
        )
        assert mx.array_equal(out[0], together[row])
        assert mx.array_equal(lse[0], together_lse[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_call_gives_the_same_bits(dtype: mx.Dtype) -> None:
    problem = make_problem(lengths=[5000, 40, 0, 1500], head_dim=128, dtype=dtype)
    first = decode(problem)
    plan = plan_of(problem)
    for _ in range(50):
        for found in (decode(problem), plan.run(problem.q, problem.k_pages, problem.v_pages, return_lse=True)):
            assert all(mx.array_equal(left, right) for left, right in zip(first, found, strict=True))


def plan_of(problem: Problem) -> DecodePlan:
    num_pages, page_size, num_kv_heads, head_dim = problem.k_pages.shape
    csr = ("indptr", "indices", "last_page_len", "first_page_offset", "window")
    return plan_from_csr(
        **{name: problem.arguments[name] for name in csr},
        num_pages=num_pages,
        page_size=page_size,
        num_qo_heads=problem.q.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        backend="cuda",
    )


def test_results_that_nobody_waits_for() -> None:
    """Launches share a workspace; their results are not looked at until all are made."""
    problems = [
        make_problem(lengths=[4000, 900, 2], num_kv_heads=1, head_dim=128, dtype=mx.float16, seed=seed)
        for seed in range(4)
    ]
    plan = plan_of(problems[0])
    csr = {name: problems[0].arguments[name] for name in ("indptr", "indices", "last_page_len")}
    runs = []
    for _ in range(10):
        for problem in problems:
            # All have the plan's lengths, and pages of their own: the plan's, filled with what the others hold.
            k, v = (_in_order_of(problem, csr["indices"], pool) for pool in (problem.k_pages, problem.v_pages))
            runs.append((problem, *plan.run(problem.q, k, v, return_lse=True)))
    for problem, out, lse in runs:
        problem.check(out, lse)


def _in_order_of(problem: Problem, indices: Any, pool: mx.array) -> mx.array:
    """`pool` with its rows' pages moved to where `indices` expects them."""
    own = problem.arguments["indices"][:-1]
    source = np.arange(pool.shape[0])
    source[indices[:-1]] = own
    source[np.setdiff1d(np.arange(pool.shape[0]), indices[:-1])] = np.setdiff1d(np.arange(pool.shape[0]), own)
    return pool[mx.array(source)]


def newest(problem: Problem) -> tuple[list[int], list[int], list[int]]:
    """Rows with tokens, and page and place of the newest token of each."""
    indptr, indices = problem.arguments["indptr"], problem.arguments["indices"]
    last = problem.arguments["last_page_len"]
    rows = [row for row in range(len(last)) if last[row]]
    return rows, [int(indices[indptr[row + 1] - 1]) for row in rows], [int(last[row]) - 1 for row in rows]


def tokens_at(pool: mx.array, pages: list[int], places: list[int]) -> mx.array:
    return mx.stack([pool[page, place] for page, place in zip(pages, places, strict=True)])


def check_append(problem: Problem, plan: DecodePlan, k: mx.array, v: mx.array, pages: list[int]) -> None:
    """Takes the newest tokens out of the pools, NHD, and lets the launch put them back. `pages` hold them."""
    rows, _, places = newest(problem)
    num_rows, (num_kv_heads, head_dim) = problem.q.shape[0], k.shape[2:]
    news = []
    for pool in (k, v):
        tokens = tokens_at(pool, pages, places)
        new = mx.full((num_rows, num_kv_heads, head_dim), np.nan, pool.dtype)  # rows without tokens take none
        new[mx.array(rows)] = tokens
        pool[mx.array(pages), mx.array(places)] = mx.array(np.nan, pool.dtype)
        news.append((tokens, new))
    mx.eval(k, v, news)
    (k_tokens, k_new), (v_tokens, v_new) = news
    out, lse = plan.run(
        problem.q,
        k,
        v,
        k_new=k_new,
        v_new=v_new,
        sinks=problem.arguments["sinks"],
        logits_soft_cap=problem.arguments["logits_soft_cap"],
        return_lse=True,
    )
    for pool, tokens in ((k, k_tokens), (v, v_tokens)):
        assert mx.array_equal(tokens_at(pool, pages, places), tokens)
    problem.check(out, lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [8, 32, 128])
@pytest.mark.parametrize(
    "options", [{}, {"window": 21, "sinks": True, "offset": True, "logits_soft_cap": 5.0}], ids=str
)
def test_append_into_poison(dtype: mx.Dtype, page_size: int, options: dict[str, Any]) -> None:
    for head_dim in (64, 80, 256):
        problem = make_problem(
            lengths=[1, 0, page_size, page_size + 1, 3000],
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            **options,
        )
        _, pages, _ = newest(problem)
        check_append(problem, plan_of(problem), problem.k_pages, problem.v_pages, pages)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pools_of_more_than_2_to_the_31_elements(layout: str, dtype: mx.Dtype) -> None:
    """The rows' pages are the last ones of pools of more than 4 GiB."""
    problem = make_problem(lengths=[700, 5, 0, 129], head_dim=128, dtype=dtype, layout=layout)
    num_own = problem.k_pages.shape[0]
    num_before = 2**31 // (16 * 2 * 128) + 5
    k, v = (
        mx.concatenate([mx.full((num_before, *pool.shape[1:]), np.nan, dtype), pool])
        for pool in (problem.k_pages, problem.v_pages)
    )
    mx.eval(k, v)
    assert k.size > 2**31
    assert k.shape[0] == num_before + num_own
    problem.arguments["indices"] = problem.arguments["indices"][:-1] + num_before
    problem.k_pages, problem.v_pages = k, v
    problem.check(*decode(problem))
    if layout == "NHD":
        _, pages, _ = newest(problem)
        check_append(problem, plan_of(problem), k, v, pages)


def test_a_pool_that_mlx_has_yet_to_write() -> None:
    problem = make_problem(lengths=[100, 3], head_dim=64, dtype=mx.float16)
    k, v = mx.zeros_like(problem.k_pages), mx.zeros_like(problem.v_pages)
    mx.eval(k, v)
    pages = mx.array(problem.arguments["indices"][:-1])
    k[pages], v[pages] = problem.k_pages[pages], problem.v_pages[pages]
    out, lse = paged_decode(problem.q, k, v, **problem.arguments, backend="cuda", return_lse=True)
    k[pages] = mx.zeros(k.shape[1:], k.dtype)
    mx.eval(k)
    problem.check(out, lse)

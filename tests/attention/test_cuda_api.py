"""`backend="cuda"` of the public functions around its kernels, which doubles stand for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cuda_double import KernelsDouble
from pairwise import pairwise_cover
from problem import make_problem
from test_grid import FACTORS, check, name_of
from test_plan import DIM, GEOMETRY, HEADS, KV_HEADS, NUM_PAGES, PAGE_SIZE, Rows, assert_close, pools, tokens

from mlxcel_paged.attention import backend_choice
from mlxcel_paged.attention.api import paged_decode
from mlxcel_paged.attention.plan_api import DecodePlan, plan_from_csr
from mlxcel_paged.errors import InvalidArgumentError, InvalidTypeError

DTYPES = [mx.float16, mx.bfloat16]
CASES = pairwise_cover(
    {**FACTORS, "dtype": DTYPES, "head_dim": [64, 96], "group_size": [1, 3, 16], "page_size": [8, 32]}
)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> KernelsDouble:
    double = KernelsDouble()
    monkeypatch.setattr(backend_choice, "default_cuda_kernels", lambda: double)
    return double


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_pairwise_cover(case: dict[str, Any]) -> None:
    check(case, "cuda", seed=1)


def test_a_batch_that_does_not_fit_a_step_is_uploaded(kernels: KernelsDouble) -> None:
    problem = make_problem(lengths=[2000, 0, 1500, 3], num_kv_heads=1, page_size=8, dtype=mx.float16)
    tensors = (problem.q, problem.k_pages, problem.v_pages)
    problem.check(*paged_decode(*tensors, **problem.arguments, backend="cuda", return_lse=True))
    problem.check(*paged_decode(*tensors, **problem.arguments, backend="cuda", return_lse=True, batch_invariant=True))
    assert kernels.step_double.num_words == []


@pytest.mark.parametrize("options", [{"sm_scale": 3e38}, {"logits_soft_cap": 1e-40}, {"logits_soft_cap": 3e38}])
def test_factors_at_the_ends_of_float32(options: dict[str, float]) -> None:
    problem = make_problem(lengths=[40, 3], dtype=mx.float16)
    arguments = {**problem.arguments, **options}
    out = paged_decode(mx.zeros_like(problem.q), problem.k_pages, problem.v_pages, **arguments, backend="cuda")
    assert np.isfinite(np.array(out)).all()


def check_run(plan: DecodePlan, rows: Rows, step: int, dtype: mx.Dtype, window: int | None) -> None:
    """Two layers, the second with sinks, soft cap and scale."""
    num_rows = len(rows.lengths)
    options = {"sinks": mx.arange(HEADS).astype(dtype), "logits_soft_cap": 3.0, "sm_scale": 0.3}
    for layer, layer_options in enumerate(({}, options)):
        k, v = pools(dtype, seed=8 + layer)
        q = tokens(num_rows, HEADS, 2 * step + layer, dtype)
        out, lse = plan.run(q, k, v, return_lse=True, **layer_options)
        expected, expected_lse = paged_decode(
            q, k, v, **rows.csr(), window=window, backend="reference", return_lse=True, **layer_options
        )
        assert_close(out, expected)
        finite = np.isfinite(np.array(expected_lse))
        assert (np.isfinite(np.array(lse)) == finite).all()
        assert np.allclose(np.array(lse)[finite], np.array(expected_lse)[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("rhythm", [(1,), (2,), (0, 1, 3), (9, 0, 1)])
def test_any_rhythm_of_advances_and_runs(rhythm: tuple[int, ...], window: int | None, dtype: mx.Dtype) -> None:
    rows = Rows([0, 1, 7, 8, 9, 23], [0, 0, 3, 0, 7, 0])
    plan = plan_from_csr(**rows.csr(), **GEOMETRY, window=window, backend="cuda")
    assert plan.backend == "cuda"
    if rhythm[0] != 9:
        check_run(plan, rows, 0, dtype, window)
    for step in range(2 * PAGE_SIZE // max(rhythm)):
        for _ in range(rhythm[step % len(rhythm)]):
            rows.grow(plan)
        check_run(plan, rows, step + 1, dtype, window)


def test_a_page_given_without_an_advance_changes_nothing_yet() -> None:
    rows = Rows([8, 3], [0, 0])
    plan = plan_from_csr(**rows.csr(), **GEOMETRY, backend="cuda")
    check_run(plan, rows, 0, mx.float16, None)
    plan.append_page(0, rows.free[-1])
    check_run(plan, rows, 1, mx.float16, None)
    rows.pages[0].append(rows.free.pop())
    rows.lengths = [length + 1 for length in rows.lengths]
    plan.advance()
    check_run(plan, rows, 2, mx.float16, None)


def test_runs_of_two_dtypes_take_turns() -> None:
    rows = Rows([8, 3, 30], [0, 0, 2])
    plan = plan_from_csr(**rows.csr(), **GEOMETRY, backend="cuda")
    for step in range(12):
        check_run(plan, rows, step, DTYPES[step // 3 % 2], None)
        rows.grow(plan)


def test_a_steady_step_carries_no_word(kernels: KernelsDouble) -> None:
    rows = Rows([17, 18], [0, 0])
    plan = plan_from_csr(**rows.csr(), **GEOMETRY, backend="cuda")
    for step in range(5):
        check_run(plan, rows, step, mx.float16, None)
        rows.grow(plan)
    assert kernels.step_double.num_words == [0, 0, 0, 0]


def test_a_step_that_fails_is_made_anew(kernels: KernelsDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([7, 18], [0, 0])
    plan = plan_from_csr(**rows.csr(), **GEOMETRY, backend="cuda")
    check_run(plan, rows, 0, mx.float16, None)
    rows.grow(plan)
    with monkeypatch.context() as patch:
        patch.setattr(type(kernels.step_double), "__call__", _fail)
        with pytest.raises(RuntimeError, match="no memory"):
            check_run(plan, rows, 1, mx.float16, None)
    check_run(plan, rows, 1, mx.float16, None)


def _fail(*_: Any) -> None:
    raise RuntimeError("no memory")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_appended_token_is_written_and_seen(dtype: mx.Dtype) -> None:
    rows = Rows([1, 7, 0, 8, 23], [0, 3, 0, 0, 0])
    plan = plan_from_csr(**rows.csr(), **GEOMETRY, backend="cuda")
    k, v = pools(dtype)
    for step in range(PAGE_SIZE + 1):
        mirror_k, mirror_v = (np.array(pool.astype(mx.float32)) for pool in (k, v))
        if step:  # a row without tokens takes none
            rows.grow(plan)
        q = tokens(5, HEADS, 3 * step, dtype)
        k_new, v_new = tokens(5, KV_HEADS, 3 * step + 1, dtype), tokens(5, KV_HEADS, 3 * step + 2, dtype)
        out = plan.run(q, k, v, k_new=k_new, v_new=v_new)
        for row, pages in enumerate(rows.pages):
            if pages:
                slot = (rows.firsts[row] + rows.lengths[row] - 1) % PAGE_SIZE
                mirror_k[pages[-1], slot] = np.array(k_new.astype(mx.float32))[row]
                mirror_v[pages[-1], slot] = np.array(v_new.astype(mx.float32))[row]
        assert np.array_equal(np.array(k.astype(mx.float32)), mirror_k)
        assert np.array_equal(np.array(v.astype(mx.float32)), mirror_v)
        assert_close(out, paged_decode(q, k, v, **rows.csr(), backend="reference"))


def _halves(pool: mx.array) -> tuple[mx.array, mx.array]:
    return pool[:, 0], pool[:, 1]


def _heads_first(pool: mx.array) -> tuple[mx.array, mx.array]:
    return pool[0, :].swapaxes(1, 2), pool[1, :].swapaxes(1, 2)  # pool[0] would be a copy


@pytest.mark.parametrize(
    ("shape", "views"),
    [
        ((NUM_PAGES, 2, PAGE_SIZE, KV_HEADS, DIM), _halves),
        ((2, NUM_PAGES, KV_HEADS, PAGE_SIZE, DIM), _heads_first),
    ],
)
def test_an_append_through_views_lands_in_the_pool(shape: tuple[int, ...], views: Any) -> None:
    rows = Rows([3, 10], [0, 0])
    plan = plan_from_csr(**rows.csr(), **GEOMETRY, backend="cuda")
    pool = mx.array(np.random.default_rng(2).standard_normal(shape).astype(np.float16))
    k, v = views(pool)
    rows.grow(plan)
    new, q = tokens(2, KV_HEADS, 1, mx.float16), tokens(2, HEADS, 0, mx.float16)
    out = plan.run(q, k, v, k_new=new, v_new=2 * new)
    for row, slot in ((0, 3), (1, 2)):
        k_again, v_again = views(pool)
        assert mx.array_equal(k_again[rows.pages[row][-1], slot], new[row])
        assert mx.array_equal(v_again[rows.pages[row][-1], slot], 2 * new[row])
    assert_close(out, paged_decode(q, k, v, **rows.csr(), backend="reference"))
    assert_close(plan.run(q, k, v), out)


def _shifted(array: mx.array) -> mx.array:
    """`array` at an address that no chunk of 16 bytes begins at."""
    return mx.concatenate([array[:1].reshape(-1)[:3], array.reshape(-1)])[3:].reshape(array.shape)


def test_arrays_of_any_place_and_strides_can_be_read() -> None:
    rows = Rows([3, 10], [0, 0])
    k, v = pools(mx.float16)
    q = tokens(2, HEADS, 0, mx.float16)
    expected = paged_decode(q, k, v, **rows.csr(), backend="reference")
    doubled = mx.concatenate([k[..., None], v[..., None]], axis=-1)
    stacked = mx.stack([k, v], axis=1)
    for other_q, other_k, other_v in (
        (_shifted(q), k, v),
        (q, _shifted(k), _shifted(v)),
        (q, k, stacked[:, 1]),
        (q.swapaxes(1, 2).swapaxes(1, 2), doubled[..., 0], doubled[..., 1]),
        (q, mx.contiguous(k[::-1])[::-1], mx.contiguous(v[::-1])[::-1]),
    ):
        assert_close(paged_decode(other_q, other_k, other_v, **rows.csr(), backend="cuda"), expected)
    plan = plan_from_csr(**rows.csr(), **GEOMETRY, backend="cuda")
    rows.grow(plan)
    new = tokens(2, KV_HEADS, 1, mx.float16)
    out = plan.run(_shifted(q), k, v, k_new=_shifted(new), v_new=_shifted(2 * new))
    assert_close(out, paged_decode(q, k, v, **rows.csr(), backend="reference"))


def test_pools_that_cannot_be_written_in_place_are_named_and_left_alone() -> None:
    rows = Rows([3, 10], [0, 0])
    plan = plan_from_csr(**rows.csr(), **GEOMETRY, backend="cuda")
    good = pools(mx.float16)
    shape = (NUM_PAGES, PAGE_SIZE, KV_HEADS, DIM)
    wide = mx.zeros((*shape[:3], DIM + 4), mx.float16)
    stacked = mx.zeros((NUM_PAGES, 2, *shape[1:]), mx.float16)
    turned = mx.zeros((NUM_PAGES, PAGE_SIZE, DIM, KV_HEADS), mx.float16)
    for argument, k, v in (
        ("k_pages", wide[..., :DIM], good[1]),
        ("k_pages", wide[..., 4:], wide[..., 4:]),
        ("v_pages", good[0], stacked[:, 0]),
        ("v_pages", good[0], turned.swapaxes(2, 3)),
        ("v_pages", good[0], good[0]),
        ("v_pages", good[0], good[0][:]),
    ):
        new = tokens(2, KV_HEADS, 1, mx.float16)
        before = np.array(k), np.array(v)
        with pytest.raises(InvalidArgumentError) as caught:
            plan.run(tokens(2, HEADS, 0, mx.float16), k, v, k_new=new, v_new=new)
        assert caught.value.argument == argument
        assert np.array_equal(np.array(k), before[0])
        assert np.array_equal(np.array(v), before[1])


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "argument"),
    [
        (mx.float32, mx.float32, "q"),
        (mx.float32, mx.float16, "q"),
        (mx.float16, mx.float32, "k_pages"),
        (mx.float16, mx.bfloat16, "q"),
    ],
)
def test_dtypes_that_the_kernel_does_not_serve(q_dtype: mx.Dtype, kv_dtype: mx.Dtype, argument: str) -> None:
    rows = Rows([3, 10], [0, 0])
    k, v = pools(kv_dtype)
    q = tokens(2, HEADS, 0, q_dtype)
    forced = plan_from_csr(**rows.csr(), **GEOMETRY, backend="cuda")
    for call in (lambda: paged_decode(q, k, v, **rows.csr(), backend="cuda"), lambda: forced.run(q, k, v)):
        with pytest.raises(InvalidTypeError) as caught:
            call()
        assert caught.value.argument == argument


def test_auto_gathers_dtypes_that_the_kernel_does_not_serve() -> None:
    rows = Rows([3, 10], [0, 0])
    k, v = pools()
    q = tokens(2, HEADS, 0)
    expected = paged_decode(q, k, v, **rows.csr(), backend="reference")
    assert_close(paged_decode(q, k, v, **rows.csr()), expected)
    plan = plan_from_csr(**rows.csr(), **GEOMETRY)
    assert_close(plan.run(q, k, v), expected)
    rows.grow(plan)
    new = tokens(2, KV_HEADS, 1)
    out = plan.run(q, k, v, k_new=new, v_new=new)
    assert mx.array_equal(k[rows.pages[1][-1], 2], new[1])
    assert_close(out, paged_decode(q, k, v, **rows.csr(), backend="reference"))


@pytest.mark.parametrize("shape", [{"head_dim": 112}, {"page_size": 4}, {"page_size": 24}, {"page_size": 256}])
def test_shapes_that_the_kernel_does_not_serve(shape: dict[str, int]) -> None:
    problem = make_problem(lengths=[5, 25], dtype=mx.float16, **shape)
    tensors = (problem.q, problem.k_pages, problem.v_pages)
    with pytest.raises(InvalidArgumentError) as caught:
        paged_decode(*tensors, **problem.arguments, backend="cuda")
    assert caught.value.argument == ("q" if "head_dim" in shape else "k_pages")
    with pytest.raises(InvalidArgumentError) as caught:
        plan_from_csr([0, 1], [3], [2], **{**GEOMETRY, **shape}, backend="cuda")
    assert caught.value.argument == next(iter(shape))
    assert plan_from_csr([0, 1], [3], [2], **{**GEOMETRY, **shape}).backend == "gather"


@pytest.mark.parametrize("shape", [{"head_dim": 112}, {"page_size": 24}, {"group_size": 17}, {"group_size": 40}])
def test_auto_gathers_shapes_that_the_kernel_does_not_serve(shape: dict[str, int]) -> None:
    problem = make_problem(lengths=[5, 25], dtype=mx.float16, **shape)
    tensors = (problem.q, problem.k_pages, problem.v_pages)
    problem.check(*paged_decode(*tensors, **problem.arguments, return_lse=True))


def test_auto_takes_the_kernel() -> None:
    assert plan_from_csr([0, 1], [3], [5], **GEOMETRY).backend == "cuda"


def test_a_plan_of_no_rows() -> None:
    plan = plan_from_csr([0], [], [], **GEOMETRY, backend="cuda")
    out, lse = plan.run(mx.zeros((0, HEADS, DIM), mx.float16), *pools(mx.float16), return_lse=True)
    assert out.shape == (0, HEADS, DIM)
    assert lse.shape == (0, HEADS)
    plan.advance()

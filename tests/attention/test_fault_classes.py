"""One test per class of bug that paged decode kernels have had in public."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from problem import Problem, make_problem

from mlxcel_paged.attention.api import paged_decode
from mlxcel_paged.errors import InvalidArgumentError, InvalidTypeError

BACKENDS = ["cpu", "gather"]
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def run(problem: Problem, backend: str, **changes: Any) -> tuple[mx.array, mx.array]:
    arguments = {**problem.arguments, **changes}
    return paged_decode(problem.q, problem.k_pages, problem.v_pages, **arguments, backend=backend, return_lse=True)


def array(values: mx.array) -> np.ndarray[Any, Any]:
    return np.array(values.astype(mx.float32))


def test_empty_rows_give_zero_and_minus_infinity_and_leave_their_neighbours_alone(backend: str) -> None:
    mixed = make_problem(lengths=[0, 5, 0, 300, 0])
    out, lse = run(mixed, backend)
    mixed.check(out, lse)
    assert (array(out)[[0, 2, 4]] == 0).all()
    assert (array(lse)[[0, 2, 4]] == -math.inf).all()


def test_a_batch_of_only_empty_rows(backend: str) -> None:
    problem = make_problem(lengths=[0, 0, 0])
    problem.check(*run(problem, backend))


def test_an_empty_batch(backend: str) -> None:
    problem = make_problem(lengths=[])
    out, lse = run(problem, backend)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_an_empty_row_with_a_sink_gives_zero_and_the_sink(backend: str) -> None:
    problem = make_problem(lengths=[0, 7], sinks=True)
    out, lse = run(problem, backend)
    problem.check(out, lse)
    sinks = array(problem.arguments["sinks"])
    assert array(lse)[0] == pytest.approx(sinks * math.log2(math.e), rel=1e-6)


@pytest.mark.parametrize("poison", ["nan", "inf", "largest"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_bytes_after_the_last_token_do_not_leak(backend: str, poison: str, dtype: mx.Dtype) -> None:
    problem = make_problem(lengths=list(range(33, 65)), page_size=32, num_kv_heads=1, poison=poison, dtype=dtype)
    problem.check(*run(problem, backend))


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
def test_last_page_len_at_every_edge(backend: str, page_size: int) -> None:
    lengths = [page_size + extra for extra in (-1, 0, 1)] + [2 * page_size + extra for extra in (-1, 0, 1)]
    problem = make_problem(lengths=lengths, page_size=page_size)
    problem.check(*run(problem, backend))
    for wrong in (0, page_size + 1, sum(lengths)):
        last = problem.arguments["last_page_len"].copy()
        last[2] = wrong
        with pytest.raises(InvalidArgumentError) as caught:
            run(problem, backend, last_page_len=last)
        assert caught.value.argument == "last_page_len"


@pytest.mark.parametrize("form", ["int64", "mlx", "mlx64", "list", "tuple", "strided", "mlx_strided", "reversed"])
def test_index_arguments_of_every_form_give_the_same(backend: str, form: str) -> None:
    problem = make_problem(lengths=[3, 40, 0, 17], offset=True)
    names = ("indptr", "indices", "last_page_len", "first_page_offset")

    def change(values: np.ndarray[Any, Any]) -> Any:
        spread = np.full(2 * len(values), -7, np.int32)
        spread[::2] = values
        forms: dict[str, Any] = {
            "int64": values.astype(np.int64),
            "mlx": mx.array(values),
            "mlx64": mx.array(values.astype(np.int64)),
            "list": values.tolist(),
            "tuple": tuple(values),
            "strided": spread[::2],
            "mlx_strided": mx.array(spread)[::2],
            "reversed": values[::-1].copy()[::-1],
        }
        return forms[form]

    plain, lse = run(problem, backend)
    found, found_lse = run(problem, backend, **{name: change(problem.arguments[name]) for name in names})
    assert mx.array_equal(found, plain)
    assert mx.array_equal(found_lse, lse)


def test_index_arguments_of_other_types_are_named(backend: str) -> None:
    problem = make_problem(lengths=[3, 40])
    for name in ("indptr", "indices", "last_page_len"):
        values = problem.arguments[name]
        for wrong in (
            values.astype(np.float32),
            values.astype(np.uint32),
            mx.array(values).astype(mx.uint32),
            None,
            3,
            "12",
        ):
            with pytest.raises(InvalidTypeError) as caught:
                run(problem, backend, **{name: wrong})
            assert caught.value.argument == name
        with pytest.raises(InvalidArgumentError) as shape:
            run(problem, backend, **{name: values[None]})
        assert shape.value.argument == name


@pytest.mark.parametrize("tail", [-1, 2**31 - 1, 2**40])
def test_the_tail_of_indices_is_never_read(backend: str, tail: int) -> None:
    problem = make_problem(lengths=[3, 40, 0, 17])
    used = problem.arguments["indices"][: problem.arguments["indptr"][-1]].astype(np.int64)
    padded = np.concatenate([used, np.full(9, tail)])
    for indices in (padded, padded.tolist(), mx.array(padded)):
        problem.check(*run(problem, backend, indices=indices))


def test_queries_from_a_fused_projection(backend: str) -> None:
    """`q` is a strided view of a wider array."""
    problem = make_problem(lengths=[5, 33, 18])
    batch, heads, dim = problem.q.shape
    fused = mx.concatenate([problem.q.reshape(batch, -1), mx.full((batch, 77), math.nan)], axis=1)
    problem.q = fused[:, : heads * dim].reshape(batch, heads, dim)
    problem.check(*run(problem, backend))
    spread = mx.stack([problem.q, mx.full(problem.q.shape, math.nan)], axis=2)
    problem.q = spread[:, :, 0]
    problem.check(*run(problem, backend))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_keys_and_values_as_slices_of_one_pool(backend: str, layout: str) -> None:
    problem = make_problem(lengths=[5, 33, 18], layout=layout)
    pool = mx.stack([problem.k_pages, problem.v_pages], axis=1)
    mx.eval(pool)
    problem.k_pages, problem.v_pages = pool[:, 0], pool[:, 1]
    problem.check(*run(problem, backend))


def test_keys_and_values_of_different_strides(backend: str) -> None:
    problem = make_problem(lengths=[5, 33, 18])
    wide = mx.concatenate([problem.k_pages, mx.full(problem.k_pages.shape, math.nan)], axis=2)
    mx.eval(wide)
    problem.k_pages = wide[:, :, :2]
    problem.check(*run(problem, backend))
    problem.v_pages = mx.contiguous(problem.v_pages.swapaxes(1, 2)).swapaxes(1, 2)
    problem.check(*run(problem, backend))


def test_pools_whose_last_axis_is_not_contiguous(backend: str) -> None:
    problem = make_problem(lengths=[5, 33])
    problem.k_pages = mx.contiguous(problem.k_pages.swapaxes(2, 3)).swapaxes(2, 3)
    mx.eval(problem.k_pages)
    problem.check(*run(problem, backend))


def test_numpy_inputs(backend: str) -> None:
    problem = make_problem(lengths=[5, 33, 18], dtype=mx.float16)
    expected, _ = run(problem, backend)
    found = paged_decode(
        np.array(problem.q),
        np.array(problem.k_pages),
        np.array(problem.v_pages),
        **problem.arguments,
        backend=backend,
    )
    assert isinstance(found, mx.array)
    assert mx.array_equal(found, expected)


def test_heads_are_not_swapped_in_any_group_size(backend: str) -> None:
    """Values tell the KV head, so a query head that reads another's KV gives another constant."""
    for group_size in range(1, 17):
        problem = make_problem(lengths=[70, 9], num_kv_heads=3, group_size=group_size)
        constant = mx.broadcast_to(mx.arange(3, dtype=mx.float32)[:, None], problem.v_pages.shape)
        problem.v_pages = mx.where(mx.isnan(problem.v_pages), problem.v_pages, constant)
        out, _ = run(problem, backend)
        expected = np.repeat(np.arange(3), group_size)[None, :, None]
        assert np.allclose(array(out), expected, atol=1e-5)


def test_query_heads_that_do_not_divide_are_named(backend: str) -> None:
    problem = make_problem(lengths=[5], num_kv_heads=4, group_size=2)
    for heads in (3, 5, 7):
        problem.q = mx.zeros((1, heads, 64))
        with pytest.raises(InvalidArgumentError) as caught:
            run(problem, backend)
        assert caught.value.argument == "q"


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 39, 40, 41, 2**31 - 1])
@pytest.mark.parametrize("offset", [False, True])
def test_a_window_sees_exactly_its_tokens(backend: str, window: int, offset: bool) -> None:
    """Equal keys and one-hot values show the set of visible tokens."""
    length = 40
    problem = make_problem(lengths=[length], num_kv_heads=1, group_size=1, window=window, offset=offset)
    first = 0 if problem.arguments["first_page_offset"] is None else int(problem.arguments["first_page_offset"][0])
    pages = problem.arguments["indices"]
    values = np.array(problem.v_pages)
    for token in range(max(0, length - window), length):
        place = first + token
        values[pages[place // 16], place % 16, 0] = np.eye(64)[token]
    problem.k_pages = mx.where(mx.isnan(problem.k_pages), problem.k_pages, mx.array(0.0))
    problem.v_pages = mx.array(values)
    out, lse = run(problem, backend)
    visible = min(window, length)
    expected = np.zeros(64)
    expected[length - visible : length] = 1 / visible
    assert np.allclose(array(out)[0, 0], expected, atol=1e-6)
    assert float(lse[0, 0]) == pytest.approx(math.log2(visible), abs=1e-5)


@pytest.mark.parametrize("window", [0, -1, 2**31])
def test_a_window_out_of_range_is_named(backend: str, window: int) -> None:
    problem = make_problem(lengths=[5])
    with pytest.raises(InvalidArgumentError) as caught:
        run(problem, backend, window=window)
    assert caught.value.argument == "window"


def test_equal_keys_count_every_token_once(backend: str) -> None:
    """Keys 0 and values 1: the output is 1 and the LSE log2(length), so a padding lane in the sum would show."""
    lengths = list(range(1, 34))
    problem = make_problem(lengths=lengths, num_kv_heads=1)
    problem.k_pages = mx.where(mx.isnan(problem.k_pages), problem.k_pages, mx.array(0.0))
    problem.v_pages = mx.where(mx.isnan(problem.v_pages), problem.v_pages, mx.array(1.0))
    out, lse = run(problem, backend)
    assert np.allclose(array(out), 1.0, atol=1e-6)
    assert np.allclose(array(lse), np.log2(lengths)[:, None], atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 2, 7, 64])
@pytest.mark.parametrize("sinks", [False, True])
def test_splits_change_nothing_but_rounding(backend: str, num_splits: int, sinks: bool) -> None:
    problem = make_problem(lengths=[1500, 3, 700], sinks=sinks, group_size=7, num_kv_heads=1)
    problem.check(*run(problem, backend, num_splits=num_splits))


def test_a_sink_above_all_logits(backend: str) -> None:
    problem = make_problem(lengths=[700], sinks=True)
    for num_splits in (1, 2, 7):
        out, lse = run(problem, backend, sinks=mx.full((4,), 60.0), num_splits=num_splits)
        assert float(mx.abs(out).max()) < 1e-15
        assert np.allclose(array(lse), 60 * math.log2(math.e), rtol=1e-6)


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_soft_cap_far_above_and_below_its_logits(backend: str, cap: float) -> None:
    problem = make_problem(lengths=[900, 5], logits_soft_cap=cap, scale_keys=300.0)
    for num_splits in (1, 5):
        problem.check(*run(problem, backend, num_splits=num_splits))


def test_large_logits_do_not_overflow(backend: str) -> None:
    problem = make_problem(lengths=[200, 33], scale_keys=1000.0)
    problem.check(*run(problem, backend))


def test_repeats_are_bit_identical(backend: str) -> None:
    problem = make_problem(lengths=[700, 9, 0, 64], dtype=mx.bfloat16, group_size=3)
    first, first_lse = run(problem, backend)
    for _ in range(20):
        again, lse = run(problem, backend)
        assert mx.array_equal(again, first)
        assert mx.array_equal(lse, first_lse)


def test_batch_invariance(backend: str) -> None:
    """A row has the same bits alone and among others."""
    problem = make_problem(lengths=[700, 9, 1300, 64])
    out, lse = run(problem, backend, batch_invariant=True)
    problem.check(out, lse)
    indptr = problem.arguments["indptr"]
    for row in range(4):
        alone, alone_lse = paged_decode(
            problem.q[row : row + 1],
            problem.k_pages,
            problem.v_pages,
            indptr=[0, int(indptr[row + 1] - indptr[row])],
            indices=problem.arguments["indices"][indptr[row] : indptr[row + 1]],
            last_page_len=problem.arguments["last_page_len"][row : row + 1],
            backend=backend,
            batch_invariant=True,
            return_lse=True,
        )
        assert mx.array_equal(alone[0], out[row])
        assert mx.array_equal(alone_lse[0], lse[row])


def test_one_page_in_several_rows(backend: str) -> None:
    """Rows may share pages, as forked sequences do."""
    problem = make_problem(lengths=[32])
    shared = np.tile(problem.arguments["indices"][:2], 3)
    out, _ = paged_decode(
        mx.concatenate([problem.q] * 3),
        problem.k_pages,
        problem.v_pages,
        indptr=[0, 2, 4, 6],
        indices=shared,
        last_page_len=[16, 16, 16],
        backend=backend,
        return_lse=True,
    )
    problem.check(out[2:], None)

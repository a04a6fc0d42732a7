"""`cpu_paged_decode` through its bindings: dtypes, strides, layouts, options, errors."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from paged_case import PagedCase

from mlxcel_paged import _core

TOLERANCE = {np.float32: 2e-5, np.float16: 1.5e-3}
LENGTHS = [0, 1, 7, 8, 9, 40, 100]


def decode(case: PagedCase, **options: Any) -> tuple[Any, Any]:
    out = np.full(case.q.shape, 7, case.dtype)
    lse = np.full(case.q.shape[:2], 7, np.float32)
    arguments = {"q": case.q, "out": out, "k_pages": case.k, "v_pages": case.v, "lse": lse, "layout": case.layout}
    _core.cpu_paged_decode(case.plan(), **{"sm_scale": case.sm_scale, **arguments, **options})
    return out, lse


def check(case: PagedCase, out: Any, lse: Any, sinks: Any = None) -> None:
    expected_out, expected_lse = case.expected(sinks)
    scale = np.abs(expected_out).max(axis=-1, keepdims=True)
    assert np.all(np.abs(out - expected_out) <= TOLERANCE[case.dtype] * scale)
    is_finite = np.isfinite(expected_lse)
    assert np.array_equal(np.isfinite(lse), is_finite)
    np.testing.assert_allclose(lse[is_finite], expected_lse[is_finite], rtol=4e-7, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_numpy_arrays(dtype: Any, layout: str) -> None:
    case = PagedCase(LENGTHS, dtype=dtype, layout=layout)
    check(case, *decode(case))


def test_options_reach_the_kernel() -> None:
    case = PagedCase(LENGTHS, window=9)
    sinks = np.linspace(-1, 3, case.num_qo_heads, dtype=np.float32)
    check(case, *decode(case, window=9, sinks=sinks), sinks)
    out, _ = decode(case, window=9)
    capped, _ = decode(case, window=9, logits_soft_cap=1.0)
    assert not np.allclose(out, capped)
    uncapped, _ = decode(case, window=9, logits_soft_cap=0.0)
    assert np.array_equal(out, uncapped)


def test_the_window_of_the_plan_holds_without_an_argument() -> None:
    case = PagedCase([30, 5], window=9)
    out = np.empty_like(case.q)
    arguments = (case.q, out, case.k, case.v)
    _core.cpu_paged_decode(case.plan(window=9), *arguments, layout="HND", sm_scale=case.sm_scale)
    np.testing.assert_allclose(out, case.expected()[0], atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_mlx_arrays(dtype: mx.Dtype) -> None:
    case = PagedCase([1, 20, 33])
    with mx.stream(mx.cpu):
        q, k, v = (mx.array(x).astype(dtype) for x in (case.q, case.k, case.v))
        out = mx.zeros(q.shape, dtype)
        mx.eval(q, k, v, out)
        case.q, case.k, case.v = (np.array(x.astype(mx.float32)) for x in (q, k, v))
        decode(case, q=q, k_pages=k, v_pages=v, out=out, lse=None)
        found = np.array(out.astype(mx.float32))
    tolerance = {mx.float32: 2e-5, mx.float16: 1.5e-3, mx.bfloat16: 1.5 / 256}[dtype]
    expected, _ = case.expected()
    assert np.all(np.abs(found - expected) <= tolerance * np.abs(expected).max(axis=-1, keepdims=True))


def test_bfloat16_carried_by_uint16() -> None:
    case = PagedCase([12, 30])
    carried = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (case.q, case.k, case.v)]
    case.q, case.k, case.v = ((x.astype(np.uint32) << 16).view(np.float32) for x in carried)
    out = np.zeros(case.q.shape, np.uint16)
    decode(case, q=carried[0], k_pages=carried[1], v_pages=carried[2], out=out)
    expected, _ = case.expected()
    found = (out.astype(np.uint32) << 16).view(np.float32)
    assert np.all(np.abs(found - expected) <= 1.5 / 256 * np.abs(expected).max(axis=-1, keepdims=True))


def test_pools_may_have_another_type_than_queries() -> None:
    case = PagedCase([12, 30], dtype=np.float16)
    q = case.q.astype(np.float32)
    out, lse = np.zeros_like(q), np.zeros(q.shape[:2], np.float32)
    decode(case, q=q, out=out, lse=lse)
    case.dtype = np.float32
    check(case, out, lse)


def test_strides_are_honoured() -> None:
    case = PagedCase([5, 12, 30])
    expected = decode(case)
    rows, heads, dim = case.q.shape
    fused = np.full((rows, heads + 4, dim + 16), np.nan, np.float32)
    fused[:, 2 : 2 + heads, 16:] = case.q
    pool = np.full((*case.k.shape[:2], 2, *case.k.shape[2:]), np.nan, np.float32)
    pool[:, :, 0], pool[:, :, 1] = case.k, case.v
    out = np.full((heads, rows, dim + 3), 7, np.float32)
    lse = np.full((heads, rows), 7, np.float32)
    decode(
        case,
        q=fused[:, 2 : 2 + heads, 16:],
        k_pages=pool[:, :, 0],
        v_pages=pool[:, :, 1],
        out=out.swapaxes(0, 1)[:, :, :dim],
        lse=lse.T,
    )
    assert np.array_equal(out.swapaxes(0, 1)[:, :, :dim], expected[0])
    assert np.array_equal(lse.T, expected[1])
    assert np.all(out[:, :, dim:] == 7)
    backwards = np.ascontiguousarray(case.q[::-1])[::-1]
    assert np.array_equal(decode(case, q=backwards)[0], expected[0])


def test_unaligned_memory() -> None:
    case = PagedCase([5, 30])
    memory = bytearray(case.q.nbytes + 1)
    q = np.frombuffer(memory, np.float32, offset=1, count=case.q.size).reshape(case.q.shape)
    q[:] = case.q
    check(case, *decode(case, q=q))


def test_new_tokens_are_written_first() -> None:
    case = PagedCase([1, 8, 9, 30])
    rng = np.random.default_rng(1)
    k_new, v_new = rng.standard_normal((2, 4, case.num_kv_heads, case.head_dim)).astype(np.float32)
    k_before = case.k.copy()
    out, lse = decode(case, k_new=k_new, v_new=v_new)
    for row, length in enumerate(case.lengths):
        page, entry = case.place(row, length - 1)
        assert np.array_equal(case.k[page, :, entry], k_new[row])
        assert np.array_equal(case.v[page, :, entry], v_new[row])
        k_before[page, :, entry] = k_new[row]
    assert np.array_equal(case.k, k_before, equal_nan=True)
    check(case, out, lse)


def test_a_batch_without_rows() -> None:
    case = PagedCase([])
    out, lse = decode(case)
    assert out.shape == (0, case.num_qo_heads, case.head_dim)
    assert lse.shape == (0, case.num_qo_heads)


def _read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


BAD: dict[str, tuple[str, Any]] = {
    "q is no array": ("q", lambda c: 5),
    "q has doubles": ("q", lambda c: c.q.astype(np.float64)),
    "q has ints": ("q", lambda c: c.q.astype(np.int32)),
    "q is big-endian": ("q", lambda c: c.q.astype(">f4")),
    "q has two dimensions": ("q", lambda c: c.q[0]),
    "q has too few rows": ("q", lambda c: c.q[:1]),
    "q has too few heads": ("q", lambda c: c.q[:, :5]),
    "q has a short last dimension": ("q", lambda c: c.q[:, :, :32]),
    "q is strided in its last dimension": ("q", lambda c: np.repeat(c.q, 2, axis=2)[:, :, ::2]),
    "q has bytes between elements": ("q", lambda c: np.zeros(c.q.shape, "f4,i2")["f0"]),
    "out is read-only": ("out", lambda c: _read_only(c.q)),
    "out is bytes": ("out", lambda c: bytes(10)),
    "out has another type": ("out", lambda c: np.zeros(c.q.shape, np.float16)),
    "out has another shape": ("out", lambda c: np.zeros((2, 6, 32), np.float32)),
    "out overlaps itself": ("out", lambda c: np.lib.stride_tricks.as_strided(c.q.copy(), c.q.shape, (0, 256, 4))),
    "out is q": ("out", lambda c: c.q),
    "lse is float16": ("lse", lambda c: np.zeros(c.q.shape[:2], np.float16)),
    "lse has another shape": ("lse", lambda c: np.zeros((2, 5), np.float32)),
    "k_pages has another page size": ("k_pages", lambda c: c.k[:, :, :4]),
    "k_pages has too few pages": ("page_ids", lambda c: c.k[:2]),
    "v_pages has another shape": ("v_pages", lambda c: c.v[:1]),
    "v_pages has another type": ("v_pages", lambda c: c.v.astype(np.float16)),
    "k_new without v_new": ("k_new", lambda c: c.k[:2, :, 0].copy()),
    "sinks have another shape": ("sinks", lambda c: np.zeros(5, np.float32)),
    "sinks are no array": ("sinks", lambda c: "no"),
    "layout is unknown": ("layout", lambda c: "hnd"),
    "layout is no str": ("layout", lambda c: 3),
    "sm_scale is NaN": ("sm_scale", lambda c: float("nan")),
    "sm_scale is too large": ("sm_scale", lambda c: 1e300),
    "sm_scale is no number": ("sm_scale", lambda c: "1"),
    "logits_soft_cap is negative": ("logits_soft_cap", lambda c: -1.0),
    "window is 0": ("window", lambda c: 0),
    "window is negative": ("window", lambda c: -1),
    "plan is no plan": ("plan", lambda c: object()),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_named_and_nothing_is_written(what: str) -> None:
    case = PagedCase([3, 20])
    argument, make = BAD[what]
    out = np.full(case.q.shape, 7, np.float32)
    good = {"plan": case.plan(), "q": case.q, "out": out, "k_pages": case.k, "v_pages": case.v}
    good |= {"layout": "HND", "sm_scale": 1.0}
    # Too few pages show when the page table is read.
    spoiled = {argument: make(case)} if argument != "page_ids" else {"k_pages": case.k[:2], "v_pages": case.v[:2]}
    with pytest.raises((_core.InvalidArgumentError, _core.InvalidTypeError)) as caught:
        _core.cpu_paged_decode(**{**good, **spoiled})
    assert caught.value.argument == ("v_new" if what == "k_new without v_new" else argument)
    assert np.all(out == 7)


def test_a_read_only_pool_is_fine_until_something_is_written() -> None:
    case = PagedCase([3, 20])
    case.k, case.v = _read_only(case.k), _read_only(case.v)
    check(case, *decode(case))
    new = np.zeros((2, case.num_kv_heads, case.head_dim), np.float32)
    with pytest.raises(_core.InvalidArgumentError, match="read-only") as caught:
        decode(case, k_new=new, v_new=new.copy())
    assert caught.value.argument == "k_pages"


def test_launches_from_several_threads_agree() -> None:
    case = PagedCase([100, 400, 7], head_dim=128)
    expected, _ = decode(case)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.extend(decode(case)[0] for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(np.array_equal(result, expected) for result in results)


def test_level_threads_and_roof() -> None:
    assert _core.simd_level() in {"portable", "avx2", "avx512", "neon"}
    assert _core.num_threads() >= 1
    assert _core.cpu_memory_roof(1 << 22, 2) > 0
    with pytest.raises(_core.InvalidArgumentError) as caught:
        _core.cpu_memory_roof(0, 1)
    assert caught.value.argument == "num_bytes"

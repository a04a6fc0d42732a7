"""`cpu_paged_prefill` and the page writes through their bindings."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from paged_case import PagedCase

from mlxcel_paged import _core


def queries(case: PagedCase, num: int) -> Any:
    return np.random.default_rng(num).standard_normal((num, case.num_qo_heads, case.head_dim)).astype(case.dtype)


def prefill(case: PagedCase, q: Any, **options: Any) -> tuple[Any, Any]:
    out, lse = np.full(q.shape, 7, q.dtype), np.full(q.shape[:2], 7, np.float32)
    arguments = {"page_ids": case.page_ids[0], "first_page_offset": 0, "num_tokens": case.lengths[0]}
    arguments |= {"layout": case.layout, "sm_scale": case.sm_scale, "lse": lse}
    _core.cpu_paged_prefill(q, out, case.k, case.v, **{**arguments, **options})
    return out, lse


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("num", "window"), [(1, None), (37, None), (90, None), (90, 1), (50, 20)])
def test_each_query_sees_the_tokens_up_to_itself(num: int, window: int | None, layout: str) -> None:
    case = PagedCase([90], layout=layout, window=window)
    q = queries(case, num)
    sinks = np.linspace(-1, 2, case.num_qo_heads, dtype=np.float32)
    out, lse = prefill(case, q, window=window, sinks=sinks)
    for i in range(num):
        expected, expected_lse = case.attend(q[i], 0, 90 - num + 1 + i, sinks)
        np.testing.assert_allclose(out[i], expected, atol=2e-5 * np.abs(expected).max())
        np.testing.assert_allclose(lse[i], expected_lse, rtol=4e-7, atol=1e-5)


def test_strided_mlx_queries_and_new_tokens() -> None:
    # As an engine has them: [heads, tokens, head_dim] behind swapped axes.
    case = PagedCase([60])
    rng = np.random.default_rng(3)
    with mx.stream(mx.cpu):
        q = mx.array(rng.standard_normal((case.num_qo_heads, 20, case.head_dim)).astype(np.float32)).swapaxes(0, 1)
        k_new, v_new = (
            mx.array(rng.standard_normal((case.num_kv_heads, 20, case.head_dim)).astype(np.float32)).swapaxes(0, 1)
            for _ in range(2)
        )
        mx.eval(q, k_new, v_new)
    out = np.empty(q.shape, np.float32)
    prefill_options: dict[str, Any] = {"num_tokens": 60, "first_page_offset": 0, "page_ids": np.array(case.page_ids[0])}
    _core.cpu_paged_prefill(
        q, out, case.k, case.v, layout="HND", sm_scale=case.sm_scale, k_new=k_new, v_new=v_new, **prefill_options
    )
    assert np.array_equal(case.tokens(case.k, 0, 60)[40:], np.array(k_new))
    assert np.array_equal(case.tokens(case.v, 0, 60)[40:], np.array(v_new))
    for i in range(20):
        expected, _ = case.attend(np.array(q)[i], 0, 41 + i)
        np.testing.assert_allclose(out[i], expected, atol=2e-5 * np.abs(expected).max())


def test_writes_equal_the_fused_ones() -> None:
    for layout in ("HND", "NHD"):
        fused, apart = PagedCase([60], layout=layout), PagedCase([60], layout=layout)
        k_new, v_new = np.random.default_rng(1).standard_normal((2, 33, 2, 64)).astype(np.float32)
        prefill(fused, queries(fused, 33), k_new=k_new, v_new=v_new)
        arguments: dict[str, Any] = {"page_ids": apart.page_ids[0], "first_page_offset": 0, "num_tokens": 60}
        _core.cpu_write_pages(k_new, v_new, apart.k, apart.v, layout=layout, **arguments)
        assert np.array_equal(fused.k, apart.k, equal_nan=True)
        assert np.array_equal(fused.v, apart.v, equal_nan=True)


def test_write_decode_writes_the_newest_token_of_each_row() -> None:
    case = PagedCase([1, 8, 30])
    k_new, v_new = np.random.default_rng(1).standard_normal((2, 3, 2, 64)).astype(np.float32)
    _core.cpu_write_decode(case.plan(), k_new, v_new, case.k, case.v, layout="HND")
    for row, length in enumerate(case.lengths):
        page, entry = case.place(row, length - 1)
        assert np.array_equal(case.k[page, :, entry], k_new[row])
        assert np.array_equal(case.v[page, :, entry], v_new[row])


def test_copy_page_works_in_place_on_mlx_pools() -> None:
    with mx.stream(mx.cpu):
        pool = mx.random.normal((4, 2, 8, 16)).astype(mx.bfloat16)
        mx.eval(pool)
        before = np.array(pool.view(mx.uint16))
        _core.cpu_copy_page(pool, 1, 3)
        before[3] = before[1]
        assert np.array_equal(np.array(pool.view(mx.uint16)), before)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("page_ids", [0, 10**6, 2]),
        ("page_ids", [0.5]),
        ("page_ids", None),
        ("first_page_offset", 8),
        ("first_page_offset", -1),
        ("num_tokens", 19),
        ("num_tokens", 10**9),
        ("num_tokens", "20"),
        ("layout", "DHN"),
        ("sm_scale", None),
        ("window", 0),
    ],
)
def test_bad_arguments_are_named(argument: str, value: Any) -> None:
    case = PagedCase([20])
    with pytest.raises((_core.InvalidArgumentError, _core.InvalidTypeError)) as caught:
        prefill(case, queries(case, 20), **{argument: value})
    assert caught.value.argument == argument


def test_bad_copies_are_named() -> None:
    pool = np.zeros((4, 2, 8, 16), np.float32)
    for arguments, argument in [((pool, 4, 0), "src"), ((pool, 0, -1), "dst"), ((pool[0], 0, 1), "pages")]:
        with pytest.raises(_core.InvalidArgumentError) as caught:
            _core.cpu_copy_page(*arguments)
        assert caught.value.argument == argument


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes_alone() -> None:
    # The child has none of the parent's threads: a launch must not wait for them.
    code = (
        "import os, sys, numpy as np\n"
        "from paged_case import PagedCase\n"
        "from mlxcel_paged import _core\n"
        "case = PagedCase([500, 500], head_dim=128)\n"
        "plan, outs = case.plan(), []\n"
        "def run():\n"
        "    out = np.empty_like(case.q)\n"
        "    _core.cpu_paged_decode(plan, case.q, out, case.k, case.v, layout='HND', sm_scale=1.0)\n"
        "    return out\n"
        "before = run()\n"
        "if (child := os.fork()) == 0: os._exit(0 if np.array_equal(run(), before) else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    folder = os.path.dirname(os.path.abspath(__file__))
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        cwd=folder,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr

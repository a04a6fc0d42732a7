"""A plan that is stepped equals a plan made anew at every step."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from problem import OUT_TOLERANCE

from mlxcel_paged.attention.api import paged_decode
from mlxcel_paged.attention.plan_api import DecodePlan, plan_from_csr
from mlxcel_paged.errors import InvalidArgumentError, InvalidPlanError, InvalidTypeError

BACKENDS = ["cpu", "gather", "reference"]
PAGE_SIZE, HEADS, KV_HEADS, DIM, NUM_PAGES = 8, 6, 2, 64, 64
GEOMETRY = {
    "page_size": PAGE_SIZE,
    "num_qo_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": DIM,
    "num_pages": NUM_PAGES,
}


class Rows:
    """The batch as its owner keeps it: pages and lengths of every row, and a supply of free pages."""

    def __init__(self, lengths: list[int], firsts: list[int], seed: int = 4) -> None:
        self.random = np.random.default_rng(seed)
        self.free = self.random.permutation(NUM_PAGES).tolist()
        self.firsts, self.lengths = list(firsts), list(lengths)
        self.pages: list[list[int]] = []
        for first, length in zip(firsts, lengths, strict=True):
            count = -(-(first + length) // PAGE_SIZE) if length else 0
            self.pages.append([self.free.pop() for _ in range(count)])

    def csr(self) -> dict[str, Any]:
        counts = [len(pages) for pages in self.pages]
        ends = [first + length for first, length in zip(self.firsts, self.lengths, strict=True)]
        return {
            "indptr": np.concatenate([[0], np.cumsum(counts)]),
            "indices": np.array([page for pages in self.pages for page in pages], np.int64),
            "last_page_len": [
                (end - 1) % PAGE_SIZE + 1 if count else 0 for end, count in zip(ends, counts, strict=True)
            ],
            "first_page_offset": [first if count else 0 for first, count in zip(self.firsts, counts, strict=True)],
        }

    def grow(self, plan: DecodePlan) -> None:
        for row, pages in enumerate(self.pages):
            if self.firsts[row] + self.lengths[row] == len(pages) * PAGE_SIZE:
                pages.append(self.free.pop())
                plan.append_page(row, pages[-1])
            self.lengths[row] += 1
        plan.advance()


def pools(dtype: mx.Dtype = mx.float32, seed: int = 8) -> tuple[mx.array, mx.array]:
    random = np.random.default_rng(seed)
    shape = (NUM_PAGES, PAGE_SIZE, KV_HEADS, DIM)
    k, v = (mx.array(random.standard_normal(shape).astype(np.float32)).astype(dtype) for _ in range(2))
    mx.eval(k, v)
    return k, v


def tokens(rows: int, heads: int, step: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    random = np.random.default_rng(100 + step)
    return mx.array(random.standard_normal((rows, heads, DIM)).astype(np.float32)).astype(dtype)


def assert_close(found: mx.array, expected: mx.array) -> None:
    difference = mx.abs(found.astype(mx.float32) - expected.astype(mx.float32))
    assert float(difference.max()) <= OUT_TOLERANCE[found.dtype] * float(mx.abs(expected).max()) * 2


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("backend", BACKENDS)
def test_advance_and_append_page_equal_a_fresh_plan(backend: str, window: int | None) -> None:
    rows = Rows([0, 1, 7, 8, 9, 23], [0, 0, 3, 0, 7, 0])
    plan = plan_from_csr(**rows.csr(), **GEOMETRY, window=window, backend=backend)
    k, v = pools()
    epoch = plan.epoch
    for step in range(2 * PAGE_SIZE + 2):
        q = tokens(6, HEADS, step)
        out, lse = plan.run(q, k, v, return_lse=True)
        expected, expected_lse = paged_decode(
            q, k, v, **rows.csr(), window=window, backend="reference", return_lse=True
        )
        assert_close(out, expected)
        finite = np.isfinite(np.array(expected_lse))
        assert (np.isfinite(np.array(lse)) == finite).all()
        assert np.allclose(np.array(lse)[finite], np.array(expected_lse)[finite], rtol=1e-5, atol=1e-5)
        rows.grow(plan)
        assert plan.epoch > epoch
        epoch = plan.epoch


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_appended_token_is_written_and_seen(backend: str, dtype: mx.Dtype) -> None:
    rows = Rows([1, 7, 8, 23], [0, 3, 0, 0])
    plan = plan_from_csr(**rows.csr(), **GEOMETRY, backend=backend)
    k, v = pools(dtype)
    mirror_k, mirror_v = (np.array(pool.astype(mx.float32)) for pool in (k, v))
    for step in range(PAGE_SIZE + 1):
        rows.grow(plan)
        q = tokens(4, HEADS, 3 * step, dtype)
        k_new, v_new = tokens(4, KV_HEADS, 3 * step + 1, dtype), tokens(4, KV_HEADS, 3 * step + 2, dtype)
        out = plan.run(q, k, v, k_new=k_new, v_new=v_new)
        for row, pages in enumerate(rows.pages):
            slot = (rows.firsts[row] + rows.lengths[row] - 1) % PAGE_SIZE
            mirror_k[pages[-1], slot] = np.array(k_new.astype(mx.float32))[row]
            mirror_v[pages[-1], slot] = np.array(v_new.astype(mx.float32))[row]
        assert np.array_equal(np.array(k.astype(mx.float32)), mirror_k)
        assert np.array_equal(np.array(v.astype(mx.float32)), mirror_v)
        assert_close(out, paged_decode(q, k, v, **rows.csr(), backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_append_into_slices_of_one_pool_lands_in_the_pool(backend: str) -> None:
    rows = Rows([3, 10], [0, 0])
    plan = plan_from_csr(**rows.csr(), **GEOMETRY, backend=backend)
    pool = mx.stack(pools(), axis=1)
    k, v = pool[:, 0], pool[:, 1]
    mx.eval(pool, k, v)
    rows.grow(plan)
    new = tokens(2, KV_HEADS, 1)
    plan.run(tokens(2, HEADS, 0), k, v, k_new=new, v_new=new)
    for row, slot in ((0, 3), (1, 2)):
        assert mx.array_equal(pool[rows.pages[row][-1], 0, slot], new[row])
        assert mx.array_equal(pool[rows.pages[row][-1], 1, slot], new[row])


def test_a_row_without_room_stops_the_whole_step() -> None:
    rows = Rows([8, 3], [0, 0])
    plan = plan_from_csr(**rows.csr(), **GEOMETRY)
    k, v = pools()
    before = plan.run(tokens(2, HEADS, 0), k, v)
    with pytest.raises(InvalidPlanError):
        plan.advance()
    assert mx.array_equal(plan.run(tokens(2, HEADS, 0), k, v), before)
    rows.grow(plan)
    assert_close(plan.run(tokens(2, HEADS, 0), k, v), paged_decode(tokens(2, HEADS, 0), k, v, **rows.csr()))


@pytest.mark.parametrize(
    ("row", "page", "argument"), [(2, 1, "row"), (-1, 1, "row"), (0, NUM_PAGES, "page"), (0, -1, "page")]
)
def test_append_page_names_what_is_out_of_range(row: int, page: int, argument: str) -> None:
    plan = plan_from_csr(**Rows([8, 3], [0, 0]).csr(), **GEOMETRY)
    with pytest.raises(InvalidArgumentError) as caught:
        plan.append_page(row, page)
    assert caught.value.argument == argument


@pytest.mark.parametrize("backend", BACKENDS)
def test_run_names_what_does_not_fit_the_plan_and_writes_nothing(backend: str) -> None:
    plan = plan_from_csr(**Rows([8, 3], [0, 0]).csr(), **GEOMETRY, backend=backend)
    k, v = pools()
    good: dict[str, Any] = {
        "q": tokens(2, HEADS, 0),
        "k_pages": k,
        "v_pages": v,
        "k_new": tokens(2, KV_HEADS, 1),
        "v_new": tokens(2, KV_HEADS, 2),
    }
    before = np.array(k), np.array(v)
    shapes = {
        "q": (3, HEADS, DIM),
        "k_pages": (8, PAGE_SIZE, KV_HEADS, DIM),
        "k_new": (2, HEADS, DIM),
        "v_new": (1, KV_HEADS, DIM),
    }
    for argument, shape in shapes.items():
        changed = {**good, argument: mx.zeros(shape)}
        if argument == "k_pages":
            changed["v_pages"] = changed["k_pages"]
        with pytest.raises(InvalidArgumentError) as caught:
            run(plan, changed)
        assert caught.value.argument == argument
    for argument in ("k_new", "v_new"):
        with pytest.raises(InvalidArgumentError):
            run(plan, {**good, argument: None})
        with pytest.raises(InvalidTypeError):
            run(plan, {**good, argument: good[argument].astype(mx.float16)})
    for argument in ("k_pages", "v_pages"):
        with pytest.raises(InvalidTypeError) as wrong:
            run(plan, {**good, argument: np.array(good[argument])})
        assert wrong.value.argument == argument
    with pytest.raises(InvalidArgumentError):
        run(plan, {**good, "logits_soft_cap": -1})
    assert np.array_equal(np.array(k), before[0])
    assert np.array_equal(np.array(v), before[1])


def run(plan: DecodePlan, arguments: dict[str, Any]) -> Any:
    arguments = dict(arguments)
    return plan.run(arguments.pop("q"), arguments.pop("k_pages"), arguments.pop("v_pages"), **arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_of_no_rows(backend: str) -> None:
    plan = plan_from_csr([0], [], [], **GEOMETRY, backend=backend)
    k, v = pools()
    out, lse = plan.run(mx.zeros((0, HEADS, DIM)), k, v, return_lse=True)
    assert out.shape == (0, HEADS, DIM)
    assert lse.shape == (0, HEADS)
    plan.advance()

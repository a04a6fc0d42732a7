"""`DecodePlan.stream_items` cuts as the reference of the CUDA kernel does."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel_paged._core import DecodePlan, InvalidArgumentError, InvalidTypeError
from mlxcel_paged.kernels_cuda import ITEM_FIELDS, balanced_work_list

SHAPE: dict[str, Any] = {"num_pages": 4, "num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}
MAX_SLOTS = 48


def make_plan(lengths: list[int], offsets: list[int], page_size: int, **options: Any) -> DecodePlan:
    longest = max([1, *(length + offset for length, offset in zip(lengths, offsets, strict=True))])
    max_pages = -(-longest // page_size) + 1
    plan = DecodePlan(max_slots=MAX_SLOTS, max_pages_per_slot=max_pages, page_size=page_size, **SHAPE | options)
    # A row that leaves, so that slots are not rows.
    guest = plan.admit([0], 1)
    for length, offset in zip(lengths, offsets, strict=True):
        plan.admit(np.ones(-(-(length + offset) // page_size), np.int32), length, offset)
    plan.retire(guest)
    return plan


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    near_equal = st.integers(4000, 4200)
    length = draw(st.sampled_from([st.integers(0, 5000), st.integers(0, 300_000), near_equal, st.sampled_from([0, 1])]))
    lengths = draw(st.lists(length, min_size=1, max_size=MAX_SLOTS - 1))
    page_size = draw(st.sampled_from([8, 16, 64, 128]))
    offsets = draw(st.lists(st.integers(0, page_size - 1), min_size=len(lengths), max_size=len(lengths)))
    return {
        "page_size": page_size,
        "lengths": lengths,
        "offsets": [offset if length else 0 for length, offset in zip(lengths, offsets, strict=True)],
        "window": draw(st.none() | st.integers(1, 3000)),
        "num_splits": draw(st.none() | st.integers(1, 9)),
        "num_workers": draw(st.integers(1, 132)),
    }


@given(batches())
@settings(max_examples=200, deadline=None)
def test_the_items_are_those_of_the_reference(batch: dict[str, Any]) -> None:
    page_size = batch.pop("page_size")
    plan = make_plan(
        batch["lengths"], batch["offsets"], page_size, window=batch["window"], num_splits=batch["num_splits"]
    )
    slots = list(plan.row_slots)[: plan.num_rows]
    expected = balanced_work_list(**batch, slots=slots)

    stream = plan.stream_items(batch["num_workers"])
    items = np.asarray(stream.items)
    assert items.shape == (batch["num_workers"] * MAX_SLOTS, len(ITEM_FIELDS))
    assert items.dtype == np.int32
    np.testing.assert_array_equal(items[: len(expected.items)], expected.items)
    assert not items[len(expected.items) :].any()
    assert stream.num_partial_rows == expected.num_partial_rows
    assert stream.num_workers == batch["num_workers"]


def test_the_list_is_a_copy_and_the_plan_stays_as_it_is() -> None:
    plan = make_plan([300, 20], [0, 0], 16)
    before = plan.identity()
    stream = plan.stream_items(2, 6)
    assert plan.identity() == before
    assert stream.items.readonly
    assert stream.items.shape == (6, 8)
    kept = stream.items.tolist()
    plan.retire(plan.slot_of(0))
    assert stream.items.tolist() == kept
    assert plan.stream_items(2, 6).items.tolist() != kept


def test_num_steps_says_when_fixed_chunks_change() -> None:
    plan = make_plan([500], [0], 16, batch_invariant=True)
    stream = plan.stream_items(4)
    assert stream.num_steps == 12
    plan.append_page(plan.slot_of(0), 1)
    for _ in range(12):
        plan.advance()
    assert plan.stream_items(4).items[0, 6] == 1
    plan.advance()
    assert plan.stream_items(4).items[0, 6] == 2


def test_bad_numbers_are_refused_by_name() -> None:
    plan = make_plan([4096], [0], 16)
    for arguments, error, name in [
        ((0,), InvalidArgumentError, "num_workers"),
        ((-1,), InvalidArgumentError, "num_workers"),
        (("8",), InvalidTypeError, "num_workers"),
        ((8, 7), InvalidArgumentError, "num_items"),
        ((8, 0), InvalidArgumentError, "num_items"),
    ]:
        with pytest.raises(error) as raised:
            plan.stream_items(*arguments)  # type: ignore[arg-type]
        assert raised.value.argument == name  # type: ignore[union-attr]

"""The decode plan as Python sees it: edits, zero-copy arrays, CSR import, readers on other threads."""

import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlxcel_paged._core import (
    DecodePlan,
    InvalidArgumentError,
    InvalidPlanError,
    InvalidTypeError,
    PlanFullError,
    Slot,
    StaleSlotError,
    bench_plan,
)

SHAPE: dict[str, Any] = {"num_pages": 100, "page_size": 4, "num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}


def make_plan(**options: Any) -> DecodePlan:
    return DecodePlan(**({"max_slots": 4, "max_pages_per_slot": 8} | SHAPE | options))


def import_plan(*arrays: Any, **options: Any) -> DecodePlan:
    return DecodePlan.from_csr(*arrays, **(SHAPE | options))


def test_a_plan_steps_like_the_sequence_that_it_describes() -> None:
    plan = make_plan()
    first = plan.admit([1, 2], 7)
    second = plan.admit([3], 2, position=10)
    plan.advance()
    assert plan.rows_needing_page() == [first]
    with pytest.raises(InvalidPlanError, match="append_page first"):
        plan.advance()
    plan.append_page(first, 9)
    plan.advance()
    csr = plan.export_csr()
    assert csr.indptr.tolist() == [0, 3, 4]
    assert csr.indices.tolist() == [1, 2, 9, 3]
    assert csr.last_page_len.tolist() == [1, 4]
    assert csr.first_page_offset.tolist() == [0, 0]
    assert csr.lengths.tolist() == [9, 4]
    assert csr.positions.tolist() == [9, 12]
    plan.retire(first)
    assert plan.row_of(second) == 0
    assert plan.slot_of(0) == second
    with pytest.raises(StaleSlotError) as caught:
        plan.append_page(first, 1)
    assert (caught.value.index, caught.value.expected, caught.value.found) == (0, 0, 1)
    plan.validate()


def test_slots_are_values() -> None:
    slot = make_plan().admit([], 0)
    assert slot == Slot(0, 0) != Slot(0, 1)
    assert {slot, Slot(0, 0)} == {slot}
    assert (slot.index, slot.generation) == (0, 0)
    with pytest.raises(AttributeError):
        slot.index = 1  # type: ignore[misc]


def test_identity_tells_states_apart() -> None:
    plan = make_plan()
    slot = plan.admit([1], 3)
    before = plan.identity()
    assert before == (1, (slot,)) == plan.identity()
    plan.retire(slot)
    plan.admit([1], 3)
    assert len({before, plan.identity()}) == 2


def test_resident_arrays_are_read_only_views_of_the_live_plan() -> None:
    plan = make_plan()
    lengths, positions, pages = (np.asarray(view) for view in (plan.lengths, plan.positions, plan.page_ids))
    slot = plan.admit([5, 6], 5, 2, 30)
    plan.advance()
    assert lengths.dtype == np.int32
    assert (lengths[slot.index], positions[slot.index]) == (6, 31)
    start = np.asarray(plan.row_start)[slot.index]
    assert pages[start : start + np.asarray(plan.row_num_pages)[slot.index]].tolist() == [5, 6]
    assert np.asarray(plan.first_page_offsets)[slot.index] == 2
    assert np.asarray(plan.row_slots)[: plan.num_rows].tolist() == [slot.index]
    plan.ensure_work_list()
    items = np.asarray(plan.work_items)
    assert items.shape == (plan.num_work_items, 5)
    assert items[0].tolist() == [slot.index, 0, 2**31 - 1, 0, 1]
    assert not items[1:].any()
    assert not np.asarray(plan.merge_rows).any()
    for view in (lengths, pages, items):
        assert not view.flags.writeable
    with pytest.raises(TypeError):
        plan.lengths[0] = 1
    with pytest.raises((BufferError, TypeError)):
        ctypes.c_int.from_buffer(plan.lengths)


def test_arrays_keep_their_plan_alive() -> None:
    plan = make_plan()
    plan.admit([7], 3)
    lengths = np.asarray(plan.lengths)
    indices = np.asarray(plan.export_csr().indices)
    del plan
    gc.collect()
    assert (lengths[0], indices[0]) == (3, 7)


ARRAYS = ([0, 2, 2, 5], [4, 4, 1, 2, 3], [1, 0, 4], [3, 0, 0])


def int32(values: list[int]) -> Any:
    return np.array(values, dtype=np.int32)


def int64(values: list[int]) -> Any:
    return np.array(values, dtype=np.int64)


def strided(values: list[int]) -> Any:
    return np.repeat(np.array(values, dtype=np.int32), 3)[::3]


def little_endian(values: list[int]) -> Any:
    return (ctypes.c_int32.__ctype_le__ * len(values))(*values)


def misaligned(values: list[int]) -> Any:
    raw = np.frombuffer(b"\0" + np.array(values, dtype=np.int64).tobytes(), dtype=np.uint8)
    return raw[1:].view(np.int64)


def reversed_view(values: list[int]) -> Any:
    return np.array(values[::-1], dtype=np.int64)[::-1]


@pytest.mark.parametrize(
    "make", [list, tuple, int32, int64, strided, reversed_view, little_endian, misaligned, memoryview]
)
def test_from_csr_takes_any_index_array(make: Callable[[Any], Any]) -> None:
    arrays = [make(int32(values)) if make is memoryview else make(values) for values in ARRAYS]
    plan = import_plan(*arrays)
    csr = plan.export_csr()
    found = (csr.indptr, csr.indices, csr.last_page_len, csr.first_page_offset)
    assert tuple(view.tolist() for view in found) == ARRAYS
    assert csr.lengths.tolist() == [2, 0, 12]
    plan.validate()


UNREADABLE = [
    (np.zeros(4, dtype=np.float32), InvalidTypeError),
    (np.zeros(4, dtype=np.int16), InvalidTypeError),
    (np.zeros(4, dtype=np.uint32), InvalidTypeError),
    (np.zeros(4, dtype=">i4"), InvalidTypeError),
    (np.zeros((2, 2), dtype=np.int32), InvalidTypeError),
    ([0, 1.5], InvalidTypeError),
    ("0123", InvalidTypeError),
    (7, InvalidTypeError),
    ([0, 2**31], InvalidArgumentError),
    (np.array([0, -(2**40)]), InvalidArgumentError),
    ([0, 2**90], InvalidArgumentError),
]


@pytest.mark.parametrize(("array", "error"), UNREADABLE)
@pytest.mark.parametrize("place", range(4))
def test_from_csr_names_the_array_that_it_cannot_read(array: Any, error: type[Exception], place: int) -> None:
    arrays = [array if place == at else values for at, values in enumerate(ARRAYS)]
    with pytest.raises(error) as caught:
        import_plan(*arrays)
    assert caught.value.argument == ["indptr", "indices", "last_page_len", "first_page_offset"][place]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("place", "values", "message"),
    [
        (0, [0, 2, 2], "indptr has 3 entries"),
        (0, [1, 2, 2, 5], r"indptr\[0\] is 1"),
        (0, [0, 3, 2, 5], "decreases at row 1"),
        (0, [0, 2, 2, 6], "ends at 6, indices has 5"),
        (1, [4, 4, 1, 2, 100], r"indices\[4\] is 100"),
        (1, [-1, 4, 1, 2, 3], r"indices\[0\] is -1"),
        (2, [1, 0, 5], "row 2"),
        (2, [0, 0, 4], "row 0"),
        (2, [1, 1, 4], "row 1"),
        (3, [4, 0, 0], "row 0"),
    ],
)
def test_from_csr_refuses_what_breaks_an_invariant(place: int, values: list[int], message: str) -> None:
    arrays = [values if place == at else good for at, good in enumerate(ARRAYS)]
    with pytest.raises(InvalidPlanError, match=message):
        import_plan(*arrays)


def test_an_imported_plan_grows() -> None:
    plan = import_plan([0, 1], [3], [4], max_pages_per_slot=2)
    slot = plan.slot_of(0)
    plan.append_page(slot, 50)
    plan.advance()
    assert plan.export_csr().indices.tolist() == [3, 50]
    with pytest.raises(PlanFullError) as caught:
        plan.append_page(slot, 51)
    assert (caught.value.what, caught.value.needed, caught.value.capacity) == ("pages of a row", 3, 2)
    assert import_plan([0], [], []).num_rows == 0


def test_split_rows_list_their_partials() -> None:
    options = {"num_pages": 1000, "max_pages_per_slot": 300, "num_workers": 4, "page_size": 16, "num_kv_heads": 1}
    plan = make_plan(**options)
    plan.admit(range(256), 4096)
    plan.admit([999], 10)
    assert plan.ensure_work_list()
    assert not plan.ensure_work_list()
    items = np.asarray(plan.work_items)
    used = items[items[:, 4] != 0]
    merges = np.asarray(plan.merge_rows)
    row, begin, count = merges[0].tolist()
    assert (row, begin) == (0, 0)
    assert used[used[:, 4] == 3][:, 3].tolist() == list(range(count))
    assert used[used[:, 4] == 1][:, [0, 3]].tolist() == [[1, 1]]
    single = make_plan(**options, num_splits=1)
    single.admit(range(256), 4096)
    single.ensure_work_list()
    assert single.num_splits == 1
    assert np.count_nonzero(np.asarray(single.work_items)[:, 4]) == 1


def test_windows_drop_head_pages() -> None:
    plan = make_plan(window=5)
    slot = plan.admit([1, 2, 3], 10)
    with pytest.raises(InvalidArgumentError, match="num_pages"):
        plan.retire_head_pages(slot, 2)
    plan.retire_head_pages(slot, 1, 1)
    csr = plan.export_csr()
    assert (csr.indices.tolist(), csr.lengths.tolist(), csr.positions.tolist()) == ([2, 3], [5], [10])
    assert csr.first_page_offset.tolist() == [1]
    plan.replace_page(slot, 1, 77)
    assert plan.export_csr().indices.tolist() == [2, 77]
    with pytest.raises(InvalidArgumentError, match="page_index"):
        plan.replace_page(slot, 2, 1)


@pytest.mark.parametrize("argument", ["max_slots", "max_pages_per_slot", "num_pages", "page_size", "num_kv_heads"])
@pytest.mark.parametrize("value", [0, -5, 2**31, 2**65])
def test_sizes_out_of_range_name_the_argument(argument: str, value: int) -> None:
    options = {"max_slots": 4, "max_pages_per_slot": 8} | SHAPE | {argument: value}
    with pytest.raises(InvalidArgumentError) as caught:
        DecodePlan(**options)
    assert caught.value.argument == argument


def test_heads_must_divide() -> None:
    with pytest.raises(InvalidArgumentError, match="multiple of num_kv_heads 3, got 8"):
        make_plan(num_kv_heads=3)
    with pytest.raises(InvalidTypeError, match="slot"):
        make_plan().retire(0)  # type: ignore[arg-type]


def test_snapshots_are_consistent_while_another_thread_edits() -> None:
    plan = make_plan()
    is_done = threading.Event()
    failures: list[object] = []

    def read() -> None:
        while not is_done.is_set():
            snapshot = plan.snapshot()
            csr = snapshot.csr
            if csr.lengths.tolist() != csr.positions.tolist() or len(snapshot.slots) != len(csr.lengths):
                failures.append(snapshot)
            _ = (plan.epoch, plan.num_rows)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3000):
        slot = plan.admit([1, 2], 5)
        plan.advance()
        plan.ensure_work_list()
        plan.retire(slot)
    is_done.set()
    for thread in threads:
        thread.join()
    assert not failures
    plan.admit([1, 2], 5)
    snapshot = plan.snapshot()
    assert not snapshot.is_work_current
    assert (snapshot.epoch, tuple(snapshot.slots)) == plan.identity()
    plan.ensure_work_list()
    assert plan.snapshot().is_work_current
    assert plan.snapshot().work_items.tolist() == [[0, 0, 2**31 - 1, 0, 1]]


def test_bench_plan_times_every_update() -> None:
    timings = bench_plan(3, 100, 16, repeats=2)
    assert set(timings) == {"advance_ns", "crossing_one_ns", "crossing_all_ns", "rebuild_ns"}
    assert all(value > 0 for value in timings.values())
    for arguments in ((0, 1, 16), (1, 1, 0), (1, 2**40, 16), (2**40, 1, 16)):
        with pytest.raises(InvalidArgumentError):
            bench_plan(*arguments, repeats=1)

"""What a device has to be told of a plan, from Python."""

from __future__ import annotations

import pytest

from mlxcel_paged import _core
from mlxcel_paged._core import DecodePlan, DeviceMirror


def new_plan() -> DecodePlan:
    return DecodePlan(
        max_slots=4,
        max_pages_per_slot=8,
        num_pages=16,
        page_size=4,
        num_qo_heads=2,
        num_kv_heads=2,
        head_dim=64,
    )


def test_a_steady_step_has_nothing_to_tell() -> None:
    plan = new_plan()
    mirror, twin = DeviceMirror(plan, 8), DeviceMirror(plan, 8)
    assert not mirror.try_sync(), "the device has no plan yet"
    slot = plan.admit([3, 5], 2)
    plan.advance()
    assert mirror.sync(1) == twin.sync(1) != ()
    for _ in range(3):
        plan.advance()
        assert mirror.try_sync()
        assert twin.sync(1) == ()
    assert not mirror.try_sync(), "the plan has made no step"
    plan.append_page(slot, 7)
    plan.advance()
    assert not mirror.try_sync(), "a page came"
    words = mirror.sync(1)
    assert words == twin.sync(1)
    assert words[1::2] == (7,)
    assert mirror.num_lists == twin.num_lists == 1
    plan.advance()
    plan.advance()
    assert not mirror.try_sync(), "two steps"
    assert mirror.sync(1) == twin.sync(1) != ()


@pytest.mark.parametrize("num_rows", [True, 1.0, "1", None])
def test_a_number_of_rows_is_an_int(num_rows: object) -> None:
    plan = new_plan()
    plan.admit([3], 2)
    with pytest.raises(_core.InvalidTypeError, match="expected an int"):
        DeviceMirror(plan, 8).sync(num_rows)  # type: ignore[arg-type]

"""The balanced work list covers every visible token once, in the kernel's form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel_paged.kernels_cuda import FLAG_OPEN_END, FLAG_VALID, ITEM_FIELDS, balanced_work_list

SLOT, KV_BEGIN, KV_END, FLAGS, OUT_ROW, SPLIT, NUM_SPLITS, PARTIAL_ROW = range(len(ITEM_FIELDS))


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(0, 5000), min_size=1, max_size=40))
    page_size = draw(st.sampled_from([8, 16, 64]))
    return {
        "lengths": lengths,
        "offsets": [draw(st.integers(0, page_size - 1)) for _ in lengths],
        "window": draw(st.none() | st.integers(1, 3000)),
        "num_workers": draw(st.integers(1, 70)),
        "num_splits": draw(st.none() | st.integers(1, 9)),
    }


@given(batches())
@settings(max_examples=300, deadline=None)
def test_every_visible_token_is_in_exactly_one_item(batch) -> None:
    work = balanced_work_list(**batch)
    table = work.items.reshape(-1, batch["num_workers"], len(ITEM_FIELDS))
    valid = (table[..., FLAGS] & FLAG_VALID) != 0
    # A worker stops at its first padded item, so valid ones come first in each worker's column.
    assert (np.diff(valid.astype(np.int8), axis=0) <= 0).all()
    items = table[valid]
    partial_rows = items[items[:, NUM_SPLITS] > 1][:, PARTIAL_ROW]
    assert sorted(partial_rows) == list(range(work.num_partial_rows))
    for row, length in enumerate(batch["lengths"]):
        mine = items[items[:, OUT_ROW] == row]
        mine = mine[np.argsort(mine[:, SPLIT])]
        assert len(mine) >= 1, "an empty row still has to be written"
        assert list(mine[:, SPLIT]) == list(range(len(mine)))
        assert (mine[:, NUM_SPLITS] == len(mine)).all()
        if batch["num_splits"] is not None:
            assert len(mine) <= batch["num_splits"]
        assert [bool(flags & FLAG_OPEN_END) for flags in mine[:, FLAGS]] == [False] * (len(mine) - 1) + [True]
        assert len(mine) == 1 or (np.diff(mine[:, PARTIAL_ROW]) == 1).all()
        window = batch["window"]
        first_visible = max(0, length - window) if window else 0
        covered = [token for item in mine for token in range(max(item[KV_BEGIN], first_visible), item[KV_END])]
        assert covered == list(range(first_visible, length))


@given(batches())
@settings(max_examples=100, deadline=None)
def test_no_worker_gets_much_more_than_its_share(batch) -> None:
    batch["num_splits"] = None
    quantum = 128
    work = balanced_work_list(**batch, quantum=quantum)
    table = work.items.reshape(-1, batch["num_workers"], len(ITEM_FIELDS)).astype(np.int64)
    tokens = np.where(table[..., FLAGS] != 0, table[..., KV_END] - table[..., KV_BEGIN], 0).sum(0)
    share = tokens.sum() / batch["num_workers"]
    assert tokens.max() <= 1.04 * share + 4 * quantum + quantum * (table[..., FLAGS] != 0).sum(0).max()


@pytest.mark.parametrize(("lengths", "workers"), [([1024], 8), ([4096], 16), ([4096] * 4, 16), ([131072], 33)])
def test_few_long_rows_use_every_worker(lengths: list[int], workers: int) -> None:
    work = balanced_work_list(lengths, num_workers=workers)
    assert (work.items.reshape(-1, workers, len(ITEM_FIELDS))[0, :, FLAGS] & FLAG_VALID).all()


def test_uniform_rows_that_fill_the_machine_are_not_split() -> None:
    assert balanced_work_list([4096] * 64, num_workers=16).num_partial_rows == 0

"""The benchmark of products: its chains and its table."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from bench_products_cuda import table  # noqa: E402
from products_arms import CELLS, Case, Cell, arms_of  # noqa: E402


@pytest.mark.parametrize("storage", ["f16", "4-bit"])
def test_chains_feed_each_product_with_the_one_before(monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    mx.random.seed(3)
    monkeypatch.setitem(CELLS, "up", Cell((192,), 64))
    for cell in (Cell((128, 64), 64), Cell((64,), 192, "up")):
        case = Case(cell, storage, copies=3)
        case.length = 4
        outputs = case.prepared("mlx", 2)()
        assert outputs[0].shape == (2, 1, cell.num_inner)
        assert len(outputs) == 1 + 4 * (len(cell.features) - 1)
        assert np.isfinite(np.array(outputs[0])).all()
        assert case.error("mlx", 2) < case.tolerance


def test_a_cell_counts_the_bytes_of_its_weights() -> None:
    assert CELLS["qkv"].num_bytes("f16") == 6144 * 4096 * 2
    assert CELLS["o"].num_bytes("4-bit") == 4096 * 4096 // 2 + 4096 * 64 * 4
    assert arms_of(CELLS["o"]) == ("mlx", "single")


def test_the_table_has_a_place_for_what_is_missing() -> None:
    place = {"cell": "qkv", "storage": "f16", "rows": 4}
    text = table(
        [
            {**place, "arm": "mlx", "error": 0.0, "device_us": 21.7},
            {**place, "arm": "siblings", "error": 1.0, "failed": "differs"},
            {**place, "arm": "mlx", "host": {"build_us": 3.0, "launch_us": 16.0}},
        ]
    )
    assert "| f16 qkv: 4096 + 1024 + 1024 x 4096 | 21.7 / - / failed |" in text
    assert "| f16 qkv | 3.0 + 16.0 |  |  |" in text

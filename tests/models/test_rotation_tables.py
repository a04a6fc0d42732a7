"""RoPE in the launch gives what MLX's RoPE in front of the launch gives; the kernel is a double, the table is not."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from cuda_double import KernelsDouble
from rotation_case import POSITIONS, Case, run

from mlxcel_paged.attention.rotation_tables import RotationTables
from mlxcel_paged.kvcache.rotation import Rotation

CASES = [
    Case(),
    Case(append=False),
    Case(by_freqs=True),
    Case(traditional=True),
    Case(head_dim=64, rope_dims=64, group_size=9, dtype=mx.bfloat16),
    Case(head_dim=80, rope_dims=32, page_size=8),
    Case(head_dim=96, rope_dims=48, traditional=True, page_size=64, dtype=mx.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_launch_turns_as_mlx_does(case: Case) -> None:
    found, wanted = run(case, KernelsDouble(), in_float32=True)
    different = found.k_bits != wanted.k_bits
    # Float64 and float32 fall on different sides of a tie now and then, by one unit in the last place.
    assert different.sum() <= 1e-3 * len(POSITIONS) * case.num_kv_heads * case.head_dim
    assert np.abs(found.k_bits.astype(int) - wanted.k_bits)[different].max(initial=0) <= 1
    assert np.array_equal(found.v_bits, wanted.v_bits)
    tolerance = 2e-3 if case.dtype == mx.float16 else 1.6e-2
    np.testing.assert_allclose(found.out, wanted.out, rtol=0, atol=tolerance)


def test_the_case_would_notice() -> None:
    """Turning by one position more or in the other form is no rounding."""
    case = Case()
    found, _ = run(case, KernelsDouble(), in_float32=True)
    _, other = run(Case(traditional=True), KernelsDouble(), in_float32=True)
    assert np.abs(found.out - other.out).max() > 0.1
    assert (found.k_bits != other.k_bits).sum() > case.head_dim


@pytest.mark.parametrize("by_freqs", [False, True])
def test_a_table_holds_cosines_and_sines(by_freqs: bool) -> None:
    freqs = mx.array([1.0, 3.0, 10.0, float("inf")]) if by_freqs else None
    rotation = Rotation(dims=8, traditional=False, base=None if by_freqs else 100.0, scale=0.25, freqs=freqs)
    tables = RotationTables()
    tables.begin(mx.array([0, 3, 40], mx.int32))
    table = tables.of(rotation)
    wavelengths = np.array([1.0, 3.0, 10.0, np.inf]) if by_freqs else 100.0 ** (np.arange(4) / 4)
    angles = np.array([[0.0], [3.0], [40.0]]) * 0.25 / wavelengths
    found = np.array(table.table).reshape(3, 4, 2)
    np.testing.assert_allclose(found, np.stack([np.cos(angles), np.sin(angles)], axis=-1), rtol=0, atol=1e-5)
    assert tables.of(rotation) is table


def test_tables_are_those_of_the_pass() -> None:
    rotation = Rotation(dims=16, traditional=False, base=100.0, scale=1.0, freqs=None)
    tables = RotationTables()
    with pytest.raises(RuntimeError, match="without tables"):
        tables.of(rotation)
    found = []
    for positions in ([1, 2], [5, 6], [1]):
        tables.begin(mx.array(positions, mx.int32))
        found.append(np.array(tables.of(rotation).table))
    assert found[0].shape == (2, 1, 1, 16)
    assert found[2].shape == (1, 1, 1, 16)
    assert not np.array_equal(found[0], found[1])
    assert np.array_equal(found[0][:1], found[2])
    tables.begin(None)
    with pytest.raises(RuntimeError, match="without tables"):
        tables.of(rotation)

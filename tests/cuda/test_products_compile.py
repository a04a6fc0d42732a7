"""The kernels for products compile with NVRTC for every architecture, without spills and within their budget.

Each case takes half a second to a second.
"""

from __future__ import annotations

import sys

import pytest

from mlxcel_paged.kernels_cuda import ARCHITECTURES
from mlxcel_paged.kernels_cuda.nvrtc import Compiled, compile_file
from mlxcel_paged.models.affine_kernel import GROUP_SIZES
from mlxcel_paged.models.product_grid import MAX_PARTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC wheels are for Linux and Windows")

MAX_REGISTERS = 128  # two blocks of 256 threads a multiprocessor
PARTS = range(1, MAX_PARTS + 1)


def within_budget(compiled: Compiled) -> None:
    assert compiled.spill_bytes == 0
    assert compiled.stack_bytes == 0
    assert 0 < compiled.num_registers <= MAX_REGISTERS
    assert "warning" not in compiled.log


@pytest.mark.parametrize("num_parts", PARTS)
@pytest.mark.parametrize("is_bf16", [0, 1])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dense_products_compile(architecture: str, is_bf16: int, num_parts: int) -> None:
    definitions = (f"-DMLXCEL_BF16={is_bf16}", f"-DMLXCEL_NUM_PARTS={num_parts}")
    within_budget(compile_file("projection.cu", "projection", architecture, definitions))


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize(("bits", "is_bf16"), [(4, 0), (4, 1), (8, 0)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_quantized_products_compile(architecture: str, bits: int, is_bf16: int, group_size: int) -> None:
    """The number of matrices only changes how a block finds its own: both ends, for the group size of MLX's default."""
    for num_parts in (1, MAX_PARTS) if group_size == 64 else (1,):
        definitions = (
            *(f"-DMLXCEL_BF16={is_bf16}", f"-DMLXCEL_BITS={bits}"),
            *(f"-DMLXCEL_GROUP_SIZE={group_size}", f"-DMLXCEL_NUM_PARTS={num_parts}"),
        )
        within_budget(compile_file("projection_affine.cu", "projection_affine", architecture, definitions))

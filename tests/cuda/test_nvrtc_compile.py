"""Every instantiation of the CUDA kernel compiles with NVRTC alone, without spills and within its budget.

A representative part by default, all of them with `full`. NVRTC comes from PyPI (dependency group `cuda-ci`); its
absence fails on Linux, so that CI cannot pass without compiling.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlxcel_paged.kernels_cuda import (
    ARCHITECTURES,
    KernelVariant,
    all_variants,
    compile_variant,
    shared_limit,
    source_dir,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC wheels are for Linux and Windows")

MAX_REGISTERS = 255  # of the architecture; with one block of at most 256 threads a multiprocessor nothing is lost
MAX_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90a": 163 * 1024, "sm_120": 99 * 1024}
MIN_RING_BYTES = 64 * 1024

REPRESENTATIVE = [
    KernelVariant(head_dim, head_tiles, dtype, architecture)
    for architecture in ARCHITECTURES
    for head_dim, head_tiles, dtype in (
        (128, 1, "float16"),
        (128, 2, "bfloat16"),
        (256, 2, "float16"),
        (80, 1, "bfloat16"),
    )
]
EVERY = [variant for architecture in ARCHITECTURES for variant in all_variants(architecture)]


def check(variant: KernelVariant) -> None:
    compiled = compile_variant(variant)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.spill_bytes == 0
    assert compiled.stack_bytes == 0
    assert 0 < compiled.num_registers <= MAX_REGISTERS
    assert "warning" not in compiled.log


@pytest.mark.parametrize("variant", REPRESENTATIVE, ids=lambda variant: variant.name)
def test_representative_variants_compile(variant: KernelVariant) -> None:
    check(variant)


@pytest.mark.full
@pytest.mark.parametrize("variant", EVERY, ids=lambda variant: variant.name)
def test_every_variant_compiles(variant: KernelVariant) -> None:
    check(variant)


@pytest.mark.parametrize("variant", EVERY, ids=lambda variant: variant.name)
def test_shared_memory_is_within_budget(variant: KernelVariant) -> None:
    """The kernel asserts the same numbers when it is compiled (`MLXCEL_SHARED_BYTES`)."""
    assert variant.shared_bytes <= MAX_SHARED_BYTES[variant.architecture] <= shared_limit(variant.architecture)
    slice_bytes = 2 * 16 * variant.head_dim * 2
    assert variant.num_stages * variant.num_warps * slice_bytes >= MIN_RING_BYTES
    assert variant.num_stages >= 2


def test_the_package_carries_every_source() -> None:
    """The package holds links to `kernels/cuda`, which a wheel turns into files."""
    repository = Path(__file__).parents[2] / "kernels" / "cuda"
    wanted = {path.name: path.read_bytes() for path in repository.glob("*.cu*")}
    packaged = {path.name: path.read_bytes() for path in source_dir().glob("*.cu*")}
    assert packaged == wanted


def test_names_are_unique() -> None:
    assert len({variant.name for variant in EVERY}) == len(EVERY)


@pytest.mark.parametrize(
    ("head_dim", "group_size", "named"),
    [(72, 4, "head_dim"), (512, 4, "head_dim"), (128, 0, "group_size"), (128, 17, "group_size")],
)
def test_unserved_shapes_are_refused_by_name(head_dim: int, group_size: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        KernelVariant.for_shape(
            head_dim=head_dim, group_size=group_size, dtype="float16", architecture=ARCHITECTURES[0]
        )

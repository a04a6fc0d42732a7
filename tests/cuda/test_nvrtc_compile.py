"""Every instantiation of the CUDA kernel compiles with NVRTC alone, without spills and within its budget.

NVRTC comes from PyPI (dependency group `cuda-ci`); its absence fails on Linux, so that CI cannot pass without
compiling.
"""

from __future__ import annotations

import dataclasses
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
from mlxcel_paged.kernels_cuda.variant import RopeShape

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC wheels are for Linux and Windows")

# Registers a thread, by head_dim and head tiles: what the compiler needs today, in the steps of 8 in which registers
# are allocated. One block of at most 256 threads runs on a multiprocessor, so 255 would still cost nothing; a budget
# that is exceeded tells that the code has changed more than was meant, long before it spills.
REGISTERS = {
    (64, 1): 192,
    (64, 2): 200,
    (80, 1): 216,
    (80, 2): 224,
    (96, 1): 216,
    (96, 2): 240,
    (128, 1): 216,
    (128, 2): 248,
    (256, 1): 255,
    (256, 2): 255,
}
# Fewer warps, and with them longer rings, leave the compiler other choices.
REGISTERS_SM_120 = {
    (64, 1): 224,
    (64, 2): 216,
    (80, 1): 224,
    (80, 2): 232,
    (96, 1): 232,
    (96, 2): 240,
    (128, 1): 224,
    (128, 2): 240,
    (256, 1): 248,
    (256, 2): 255,
}
# RoPE needs a few while an item is opened, and one chunk of the new key until it is put into its slice.
ROPE_REGISTERS = 8
# Shared memory of a block in KiB, by head_dim, one number for 8 and 16 query heads.
SHARED_KIB = {64: 83, 80: 103, 96: 123, 128: 163, 256: 162}
SHARED_KIB_SM_120 = {64: 74, 80: 92, 96: 86, 128: 82, 256: 81}
MAX_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90a": 163 * 1024, "sm_120": 99 * 1024}
MIN_RING_BYTES = 64 * 1024

EVERY = [variant for architecture in ARCHITECTURES for variant in all_variants(architecture)]


def with_rope(variant: KernelVariant) -> list[KernelVariant]:
    """Halves in f16; neighbours and a part of the dims in bf16, which is the same code but for the conversions."""
    partial = variant.head_dim // 32 * 16
    ropes = [RopeShape(variant.head_dim, False)]
    if variant.dtype == "bfloat16":
        ropes = [RopeShape(variant.head_dim, True), RopeShape(partial, False)]
    return [dataclasses.replace(variant, rope=rope) for rope in ropes]


WITH_ROPE = [rotating for variant in EVERY if variant.architecture != "sm_80" for rotating in with_rope(variant)]


@pytest.mark.parametrize("variant", EVERY, ids=lambda variant: variant.name)
def test_every_variant_compiles_within_its_budget(variant: KernelVariant) -> None:
    """All of them take about 20 s on one core."""
    compiled = compile_variant(variant)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.spill_bytes == 0
    assert compiled.stack_bytes == 0
    budget = REGISTERS_SM_120 if variant.architecture == "sm_120" else REGISTERS
    assert 0 < compiled.num_registers <= budget[variant.head_dim, variant.head_tiles]
    assert "warning" not in compiled.log


@pytest.mark.parametrize("variant", WITH_ROPE, ids=lambda variant: variant.name)
def test_every_variant_takes_rope_within_its_budget(variant: KernelVariant) -> None:
    compiled = compile_variant(variant)
    assert compiled.spill_bytes == 0
    assert compiled.stack_bytes == 0
    budget = REGISTERS_SM_120 if variant.architecture == "sm_120" else REGISTERS
    assert 0 < compiled.num_registers <= min(255, budget[variant.head_dim, variant.head_tiles] + ROPE_REGISTERS)
    assert "warning" not in compiled.log


@pytest.mark.parametrize("variant", EVERY, ids=lambda variant: variant.name)
def test_shared_memory_is_within_budget(variant: KernelVariant) -> None:
    """The kernel asserts the same numbers when it is compiled (`MLXCEL_SHARED_BYTES`)."""
    assert variant.shared_bytes <= MAX_SHARED_BYTES[variant.architecture] <= shared_limit(variant.architecture)
    budget = SHARED_KIB_SM_120 if variant.architecture == "sm_120" else SHARED_KIB
    assert variant.shared_bytes <= budget[variant.head_dim] * 1024
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
    assert len({variant.name for variant in EVERY + WITH_ROPE}) == len(EVERY + WITH_ROPE)


@pytest.mark.parametrize(
    ("head_dim", "group_size", "named"),
    [(72, 4, "head_dim"), (512, 4, "head_dim"), (128, 0, "group_size"), (128, 17, "group_size")],
)
def test_unserved_shapes_are_refused_by_name(head_dim: int, group_size: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        KernelVariant.for_shape(
            head_dim=head_dim, group_size=group_size, dtype="float16", architecture=ARCHITECTURES[0]
        )


@pytest.mark.parametrize("dims", [0, 24, 144])
def test_unserved_ropes_are_refused_by_name(dims: int) -> None:
    with pytest.raises(ValueError, match="rope"):
        KernelVariant.for_shape(
            head_dim=128, group_size=4, dtype="float16", architecture=ARCHITECTURES[0], rope=RopeShape(dims, False)
        )

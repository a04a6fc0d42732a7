"""All kernels but decode compile with NVRTC for every architecture, without spills and within their budget."""

from __future__ import annotations

import sys

import pytest

from mlxcel_paged.kernels_cuda import ARCHITECTURES
from mlxcel_paged.kernels_cuda.nvrtc import compile_file
from mlxcel_paged.kernels_cuda.page_kernel import PAGE_OPERATIONS, PageKernel, compile_page_kernel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC wheels are for Linux and Windows")

# Copies hide latency with threads alone: 40 registers leave room for 6 blocks of 256 threads.
MAX_REGISTERS = 40

# MLX names architectures without a suffix.
KERNELS = [
    PageKernel(operation, chunk_bytes, architecture)
    for operation in PAGE_OPERATIONS
    for architecture in (*ARCHITECTURES, "sm_90")
    for chunk_bytes in (16, 8, 4, 2)
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_page_kernel_compiles(kernel: PageKernel) -> None:
    compiled = compile_page_kernel(kernel)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert kernel.entry_point.encode() in compiled.cubin
    assert compiled.spill_bytes == 0
    assert compiled.stack_bytes == 0
    assert 0 < compiled.num_registers <= MAX_REGISTERS
    assert "warning" not in compiled.log


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_plan_kernel_compiles(architecture: str) -> None:
    compiled = compile_file("plan_step.cu", "plan_step", architecture)
    assert compiled.spill_bytes == 0
    assert "warning" not in compiled.log


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_address_kernel_compiles(architecture: str) -> None:
    compiled = compile_file("array_addresses.cu", "array_addresses", architecture)
    assert b"mlxcel_array_addresses" in compiled.cubin
    assert compiled.spill_bytes == 0
    assert "warning" not in compiled.log


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_token_kernel_compiles(architecture: str) -> None:
    compiled = compile_file("publish_tokens.cu", "publish_tokens", architecture)
    assert b"mlxcel_publish_tokens" in compiled.cubin
    assert compiled.spill_bytes == 0
    assert "warning" not in compiled.log


def test_names_are_unique() -> None:
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)

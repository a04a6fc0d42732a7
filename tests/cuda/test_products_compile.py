"""The kernels for products compile with NVRTC for every architecture, without spills and within their budget.

Each case takes half a second to a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlxcel_paged.kernels_cuda import ARCHITECTURES
from mlxcel_paged.kernels_cuda.nvrtc import Compiled, compile_file, compile_source
from mlxcel_paged.models import affine_kernel, dense_kernel
from mlxcel_paged.models.affine_kernel import GROUP_SIZES
from mlxcel_paged.models.product_launch import MAX_PARTS

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


_TYPES = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.uint32: "unsigned int"}
_DECLARATIONS = """struct __half;
struct __nv_bfloat16;
struct Shape {
  int sizes[8];
  __device__ int operator[](int i) const { return sizes[i]; }
};
"""


def compiled_as_by_mlx(monkeypatch: pytest.MonkeyPatch, launch: Callable[[], object]) -> list[Compiled]:
    """What NVRTC makes of the text that MLX would be given in `launch`."""
    made: list[Compiled] = []

    def cuda_kernel(
        *, name: str, input_names: list[str], output_names: list[str], header: str, source: str, **_: Any
    ) -> Any:
        def run(inputs: list[mx.array], output_shapes: list[Any], output_dtypes: list[mx.Dtype], **_: Any) -> Any:
            parameters = []
            for array, parameter in zip(inputs, input_names, strict=True):
                parameters.append(f"const {_TYPES[array.dtype]}* {parameter}")
                if f"{parameter}_shape" in source:
                    parameters.append(f"const __grid_constant__ Shape {parameter}_shape")
            outputs = zip(output_dtypes, output_names, strict=True)
            parameters += [f"{_TYPES[output]}* {parameter}" for output, parameter in outputs]
            signature = f"__global__ void {name}({', '.join(parameters)})"
            text = f"{_DECLARATIONS}{header}namespace mlx {{\n{signature} {{{source}}}\n}}\n"
            options = ("--gpu-architecture=sm_90", "--std=c++17", "--ptxas-options=-v")
            made.append(compile_source(name, text.encode(), options))
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return run

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    for module in (dense_kernel, affine_kernel):
        module._kernel.cache_clear()
    try:
        launch()
    finally:
        for module in (dense_kernel, affine_kernel):
            module._kernel.cache_clear()
    return made


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_what_mlx_compiles_stays_within_the_budget(monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype) -> None:
    x, weight, bias = mx.zeros((2, 1, 256), dtype), mx.zeros((32, 256), dtype), mx.zeros((32,), dtype)
    form = affine_kernel.affine_format(4, 64, dtype)
    scales = mx.zeros((32, 4), dtype)
    words = affine_kernel.AffineWeight(mx.zeros((32, 32), mx.uint32), scales, scales)
    biased = affine_kernel.AffineWeight(words.words, scales, scales, bias)

    def launch() -> None:
        dense_kernel.dense_products(x, [weight])
        dense_kernel.dense_products(x, [weight] * 3, [bias, None, bias])
        affine_kernel.affine_products(x, [words], form)
        affine_kernel.affine_products(x, [biased, words, biased], form)

    results = compiled_as_by_mlx(monkeypatch, launch)
    assert len(results) == 4
    for result in results:
        within_budget(result)

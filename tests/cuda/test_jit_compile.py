"""The decode kernel in the form that MLX compiles, with a signature as MLX writes it, compiles with NVRTC."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import pytest

from mlxcel_paged.attention.cuda.jit_decode import JitDecodeKernel
from mlxcel_paged.kernels_cuda import ARCHITECTURES, KernelVariant
from mlxcel_paged.kernels_cuda.nvrtc import Compiled, compile_source
from mlxcel_paged.kernels_cuda.variant import RopeShape

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC wheels are for Linux and Windows")

_TYPES = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.float32: "float", mx.int32: "int"}
_DECLARATIONS = "struct __half;\nstruct __nv_bfloat16;\n"
# As DecodeLaunch passes them: geometry, strides, window, options, then the factors.
_SCALARS = (96, 12, 8, 4, 4, 257, 4096, 1024, 16384, 2048, 128, 0, 1, 0.1275174, 0.0, 0.0)


def compiled(monkeypatch: pytest.MonkeyPatch, variant: KernelVariant, dtype: mx.Dtype, *, with_lse: bool) -> Compiled:
    """What NVRTC makes of the text that MLX would be given."""
    made: list[Compiled] = []

    def cuda_kernel(
        *, name: str, input_names: list[str], output_names: list[str], header: str, source: str, **_: Any
    ) -> Any:
        def launch(inputs: list[mx.array], output_dtypes: list[mx.Dtype], **_: Any) -> list[mx.array]:
            arrays = zip(inputs, input_names, strict=True)
            parameters = [f"const {_TYPES[array.dtype]}* {parameter}" for array, parameter in arrays]
            outputs = zip(output_dtypes, output_names, strict=True)
            parameters += [f"{_TYPES[output]}* {parameter}" for output, parameter in outputs]
            signature = f"__global__ void {name}({', '.join(parameters)})"
            text = f"{_DECLARATIONS}{header}namespace mlx {{\n{signature} {{{source}}}\n}}\n"
            options = (f"--gpu-architecture={variant.architecture}", "--std=c++17", "--ptxas-options=-v")
            made.append(compile_source(name, text.encode(), options))
            return [mx.zeros((1,))]

        return launch

    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)

    def precompiled(*_: Any) -> list[mx.array]:
        raise AssertionError("MLX has compiled the kernel")

    element, word, number = mx.zeros((1,), dtype), mx.zeros((1,), mx.int32), mx.zeros((1,))
    rotations = word if variant.rope is None else number
    inputs = [element] * 5 + [word] * 5 + [rotations, number, number, word]
    dtypes = (mx.float32, dtype) if with_lse else (dtype,)
    JitDecodeKernel(variant, precompiled)(inputs, ((1,),) * len(dtypes), dtypes, _SCALARS, (8, 12))
    return made[0]


@pytest.mark.parametrize("rope", [None, RopeShape(128, False), RopeShape(64, True)], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
def test_it_compiles_without_spills(monkeypatch: pytest.MonkeyPatch, architecture: str, rope: RopeShape | None) -> None:
    for dtype, name, with_lse in ((mx.float16, "float16", False), (mx.bfloat16, "bfloat16", True)):
        variant = KernelVariant.for_shape(head_dim=128, group_size=4, dtype=name, architecture=architecture, rope=rope)
        result = compiled(monkeypatch, variant, dtype, with_lse=with_lse)
        assert result.spill_bytes == 0
        assert result.stack_bytes == 0
        assert "warning" not in result.log

"""The kernels of this machine's GPU: compiled when first asked for, kept on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import mlx.core as mx

from mlxcel_paged import env
from mlxcel_paged.attention.cuda.jit_decode import JitDecodeKernel
from mlxcel_paged.attention.cuda.kernel import Kernel, MlxKernel
from mlxcel_paged.attention.cuda.page_kernels import CudaPageKernels
from mlxcel_paged.kernels_cuda import ENTRY_POINT, CompileError, KernelVariant, NvrtcNotFoundError
from mlxcel_paged.kernels_cuda.cubin_cache import cached_cubin
from mlxcel_paged.kernels_cuda.device import CudaDevice, NoCudaDeviceError, current_device
from mlxcel_paged.kernels_cuda.variant import Dtype, RopeShape
from mlxcel_paged.kvcache.page_kernels import PageKernels

logger = logging.getLogger("mlxcel_paged")

DTYPES: dict[mx.Dtype, Dtype] = {mx.float16: "float16", mx.bfloat16: "bfloat16"}

_STEP_THREADS = 128
_PUBLISH_THREADS = 64


class CudaKernels:
    """Makes the kernels of one GPU. Each is made once.

    Args:
        device: The GPU.
        with_jit: MLX compiles the decode kernel; see `JitDecodeKernel`.
    """

    def __init__(self, device: CudaDevice, *, with_jit: bool = True) -> None:
        self.device = device
        self._with_jit = with_jit
        self._made: dict[str, Kernel] = {}

    def decode(self, *, head_dim: int, group_size: int, dtype: mx.Dtype, rope: RopeShape | None = None) -> Kernel:
        """The decode kernel of a shape, with RoPE in front if it is given."""
        variant = KernelVariant.for_shape(
            head_dim=head_dim,
            group_size=group_size,
            dtype=DTYPES[dtype],
            architecture=self.device.architecture,
            rope=rope,
        )
        precompiled = self._kernel(
            "paged_decode.cu",
            variant.name,
            lambda cubin: MlxKernel(ENTRY_POINT, cubin, variant.num_threads, variant.shared_bytes),
            variant.definitions,
        )
        return JitDecodeKernel(variant, precompiled) if self._with_jit else precompiled

    def plan_step(self) -> Kernel:
        """The kernel that moves the plan on the device by a step."""
        return self._kernel(
            "plan_step.cu", "plan_step", lambda cubin: MlxKernel("mlxcel_plan_step", cubin, _STEP_THREADS, 0)
        )

    def array_addresses(self) -> Kernel:
        """The kernel that reports where its inputs begin."""
        return self._kernel(
            "array_addresses.cu", "array_addresses", lambda cubin: MlxKernel("mlxcel_array_addresses", cubin, 1, 0)
        )

    def publish_tokens(self) -> Kernel:
        """The kernel that copies a step's tokens to host memory."""
        return self._kernel(
            "publish_tokens.cu",
            "publish_tokens",
            lambda cubin: MlxKernel("mlxcel_publish_tokens", cubin, _PUBLISH_THREADS, 0),
        )

    def pages(self) -> PageKernels:
        """The kernels that move tokens between dense arrays and pages."""
        return CudaPageKernels(self.device.architecture)

    def num_workers(self, num_kv_heads: int) -> int:
        """Workers per KV head: one block a multiprocessor, the whole batch in one wave."""
        return max(1, self.device.num_multiprocessors // num_kv_heads)

    def _kernel(
        self, file_name: str, name: str, wrap: Callable[[bytes], Kernel], options: tuple[str, ...] = ()
    ) -> Kernel:
        architecture = self.device.architecture
        name = name if architecture in name else f"{name}_{architecture}"
        found = self._made.get(name)
        if found is None:
            found = wrap(cached_cubin(file_name, name, architecture, options, cache_dir=env.cache_dir()))
            self._made[name] = found
        return found


@cache
def cuda_kernels(*, with_jit: bool = True) -> CudaKernels | None:
    """The kernels of this process's GPU; None, with the reason logged, where they cannot run.

    Args:
        with_jit: As of `CudaKernels`. Pays where one geometry is launched over and over.
    """
    if not (mx.cuda.is_available() and hasattr(mx.fast, "precompiled_cuda_kernel")):
        return None
    try:
        kernels = CudaKernels(current_device(), with_jit=with_jit)
        kernels.plan_step()
    except (NoCudaDeviceError, NvrtcNotFoundError, CompileError) as error:
        logger.warning("the CUDA kernels cannot be used, gather serves instead: %s", error)
        return None
    return kernels

"""Which backend of the public attention functions serves a shape on this machine."""

from __future__ import annotations

from typing import Any, Literal, get_args

import mlx.core as mx

from mlxcel_paged.attention import validation
from mlxcel_paged.attention.cuda.library import CudaKernels, cuda_kernels
from mlxcel_paged.attention.dispatch import DTYPES, HEAD_DIMS, MAX_GROUP_SIZE, MAX_PAGE_SIZE, MIN_PAGE_SIZE, is_servable
from mlxcel_paged.errors import BackendUnavailableError

Backend = Literal["auto", "cuda", "metal", "cpu", "gather", "reference"]


def choose_backend(
    backend: Any,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    shape_arguments: tuple[str, str, str] = ("q", "k_pages", "q"),
) -> str:
    """Resolves `auto` and checks that the backend runs here and serves the shape.

    `shape_arguments` are the caller's arguments that head_dim, page_size and num_qo_heads come from; errors name them.
    Dtypes are for `cuda_serves` and `check_cuda_dtypes`.

    Raises:
        InvalidArgumentError: Unknown backend, or a shape that the fused kernel does not serve.
        BackendUnavailableError: The backend needs other hardware.
    """
    backend = validation.one_of("backend", backend, get_args(Backend))
    servable = is_servable(num_qo_heads, num_kv_heads, head_dim, page_size)
    on_cpu = mx.default_device() == mx.cpu
    if backend == "auto":
        if default_cuda_kernels() is not None:
            return "cuda" if servable and _is_power_of_two(page_size) else "gather"
        return "cpu" if on_cpu and servable else "gather"
    if backend == "metal" or (backend == "cuda" and default_cuda_kernels() is None):
        raise BackendUnavailableError(f"backend {backend} is not available here (hint: cpu, gather or auto)")
    if backend == "cpu" and not on_cpu and not mx.metal.is_available():
        raise BackendUnavailableError("backend cpu would move the pools out of GPU memory (hint: use auto)")
    if backend in ("cpu", "cuda"):
        if head_dim not in HEAD_DIMS:
            raise validation.invalid(
                shape_arguments[0], f"head_dim must be one of {', '.join(map(str, HEAD_DIMS))}: {head_dim}"
            )
        group_size = num_qo_heads // num_kv_heads
        if group_size > MAX_GROUP_SIZE:
            raise validation.invalid(
                shape_arguments[2], f"{group_size} query heads per KV head; {backend} takes at most {MAX_GROUP_SIZE}"
            )
        if not servable:
            raise validation.invalid(
                shape_arguments[1], f"page_size must be between {MIN_PAGE_SIZE} and {MAX_PAGE_SIZE}: {page_size}"
            )
    if backend == "cuda" and not _is_power_of_two(page_size):
        raise validation.invalid(shape_arguments[1], f"page_size must be a power of two for cuda: {page_size}")
    return str(backend)


def default_cuda_kernels() -> CudaKernels | None:
    """The CUDA kernels if MLX's default device is a GPU that runs them. They are compiled before they are launched: a
    compilation by MLX would come with every geometry anew."""
    return None if mx.default_device() == mx.cpu else cuda_kernels(with_jit=False)


def cuda_serves(q_dtype: mx.Dtype, kv_dtype: mx.Dtype) -> bool:
    """Whether the CUDA kernel serves these dtypes."""
    return q_dtype in DTYPES["cuda"] and kv_dtype == q_dtype


def check_cuda_dtypes(q_dtype: mx.Dtype, kv_dtype: mx.Dtype) -> None:
    """Raises an InvalidTypeError that names the argument whose dtype the CUDA kernel does not serve."""
    for argument, dtype in (("q", q_dtype), ("k_pages", kv_dtype)):
        if dtype not in DTYPES["cuda"]:
            raise validation.invalid_type(argument, f"expected float16 or bfloat16 for cuda, got {dtype}")
    if q_dtype != kv_dtype:
        raise validation.invalid_type("q", f"expected the pools' {kv_dtype} for cuda, got {q_dtype}")


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0

"""Page writes, page copies and the gathering of a prefix on CUDA, launched through MLX.

MLX hands kernels its inputs as constants; these kernels write the pools through them. MLX knows nothing of it, so
the writers return an order token (see `mlxcel_paged.kvcache.page_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from mlxcel_paged import env
from mlxcel_paged.attention.cuda.kernel import MlxKernel
from mlxcel_paged.kernels_cuda.cubin_cache import cached_cubin
from mlxcel_paged.kernels_cuda.page_kernel import PageKernel, PageOperation

NUM_THREADS = 256
_MAX_BLOCKS = 1 << 16  # a thread takes another item when there are more


@dataclass(frozen=True, slots=True)
class PageLaunch:
    """One launch, complete but for the device.

    Attributes:
        inputs, scalars: The kernel's arguments in its order; the outputs' pointers come between them.
        outputs: Shape and dtype of every output.
        num_items: Work items along the grid's first axis.
        num_heads: Length of the grid's second axis.
    """

    kernel: PageKernel
    inputs: tuple[mx.array, ...]
    outputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...]
    scalars: tuple[int, ...]
    num_items: int
    num_heads: int = 1

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of `NUM_THREADS` threads along both axes."""
        return min(-(-self.num_items // NUM_THREADS), _MAX_BLOCKS), self.num_heads


Launch = Callable[[PageLaunch], list[mx.array]]


def launch_through_mlx(launch: PageLaunch) -> list[mx.array]:
    """Adds the launch to MLX's graph. Inputs that are not row-contiguous are copied."""
    shapes, dtypes = zip(*launch.outputs, strict=True)
    return _mlx_kernel(launch.kernel)(launch.inputs, shapes, dtypes, launch.scalars, launch.grid)


class CudaPageKernels:
    """Implements `PageKernels` for pools in HND layout, any page size, and any dtype of 2 or 4 bytes.

    Args:
        architecture: The device's, as `sm_90`.
        launch: Runs a launch; replaced in tests.
    """

    def __init__(self, architecture: str, launch: Launch = launch_through_mlx) -> None:
        self._architecture = architecture
        self._launch = launch

    def write(self, k_view: mx.array, v_view: mx.array, k_new: mx.array, v_new: mx.array, places: mx.array) -> mx.array:
        kernel = self._kernel("page_write", k_view)
        k_new, v_new = k_new.astype(k_view.dtype), v_new.astype(v_view.dtype)
        num_tokens, num_heads, _ = k_new.shape
        chunks = _row_chunks(kernel, k_view)
        (order_token,) = self._launch(
            PageLaunch(
                kernel,
                (k_new, v_new, k_view, v_view, places),
                (((1,), mx.int32),),
                (num_tokens, num_heads, chunks, num_heads * chunks, chunks, *_pool_shape(kernel, k_view)),
                num_tokens * num_heads * chunks,
            )
        )
        return order_token

    def copy(self, k_view: mx.array, v_view: mx.array, src: int, dst: int) -> mx.array:
        kernel = self._kernel("page_copy", k_view)
        _, page_stride, _, _ = _pool_shape(kernel, k_view)
        (order_token,) = self._launch(
            PageLaunch(kernel, (k_view, v_view), (((1,), mx.int32),), (src, dst, page_stride), page_stride)
        )
        return order_token

    def gather(
        self,
        k_view: mx.array,
        v_view: mx.array,
        k_new: mx.array,
        v_new: mx.array,
        page_ids: mx.array,
        *,
        first_token: int,
        num_prefix: int,
    ) -> tuple[mx.array, mx.array]:
        kernel = self._kernel("page_gather", k_view)
        k_new, v_new = k_new.astype(k_view.dtype), v_new.astype(v_view.dtype)
        num_new, num_heads, head_dim = k_new.shape
        chunks = _row_chunks(kernel, k_view)
        dense = (1, num_heads, num_prefix + num_new, head_dim)
        keys, values = self._launch(
            PageLaunch(
                kernel,
                (k_new, v_new, k_view, v_view, page_ids),
                ((dense, k_view.dtype), (dense, v_view.dtype)),
                (
                    first_token,
                    num_prefix,
                    num_new,
                    chunks,
                    num_heads * chunks,
                    chunks,
                    *_pool_shape(kernel, k_view),
                ),
                (num_prefix + num_new) * chunks,
                num_heads,
            )
        )
        return keys, values

    def _kernel(self, operation: PageOperation, view: mx.array) -> PageKernel:
        return PageKernel.for_row(operation, view.shape[3] * view.itemsize, self._architecture)


def _row_chunks(kernel: PageKernel, view: mx.array) -> int:
    return int(view.shape[3]) * int(view.itemsize) // kernel.chunk_bytes


def _pool_shape(kernel: PageKernel, view: mx.array) -> tuple[int, int, int, int]:
    """Page size, and the strides of page, head and token in chunks: `PoolShape` of `page_address.cuh`."""
    _, num_heads, page_size, _ = view.shape
    chunks = _row_chunks(kernel, view)
    return page_size, num_heads * page_size * chunks, page_size * chunks, chunks


@cache
def _mlx_kernel(kernel: PageKernel) -> MlxKernel:
    file_name = f"{kernel.operation}.cu"
    cubin = cached_cubin(file_name, kernel.name, kernel.architecture, kernel.definitions, cache_dir=env.cache_dir())
    return MlxKernel(kernel.entry_point, cubin, NUM_THREADS, 0)

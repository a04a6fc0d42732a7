"""One compiled kernel, launched as an operation on MLX arrays.

Decode launches go through `Kernel`, so that a test can put a double in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

Scalar = int | float
Shape = tuple[int, ...]


class Kernel(Protocol):
    """A kernel of `kernels/cuda`: input pointers, output pointers, then scalars by value."""

    def __call__(
        self,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Shape],
        output_dtypes: Sequence[mx.Dtype],
        scalars: Sequence[Scalar],
        num_blocks: tuple[int, int],
    ) -> list[mx.array]:
        """Adds one launch to MLX's graph.

        Inputs that are not contiguous are copied first. A kernel that writes an input in place does so behind MLX's
        back: who reads it must depend on one of the launch's outputs, or be evaluated later.

        Args:
            inputs: Arrays whose memory the kernel gets, in its order.
            output_shapes, output_dtypes: Fresh arrays, uninitialised.
            scalars: int is int32, float is float32.
            num_blocks: Grid, (x, y).
        """


@dataclass(frozen=True, slots=True)
class MlxKernel:
    """A `Kernel` that MLX's CUDA backend launches.

    Attributes:
        entry_point: Symbol in the cubin.
        cubin: Machine code.
        num_threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
    """

    entry_point: str
    cubin: bytes
    num_threads: int
    shared_bytes: int

    def __call__(
        self,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Shape],
        output_dtypes: Sequence[mx.Dtype],
        scalars: Sequence[Scalar],
        num_blocks: tuple[int, int],
    ) -> list[mx.array]:
        outputs: list[mx.array] = mx.fast.precompiled_cuda_kernel(
            name=self.entry_point,
            compiled_source=self.cubin,
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=scalars,
            grid=(num_blocks[0] * self.num_threads, num_blocks[1], 1),  # MLX counts threads
            threadgroup=(self.num_threads, 1, 1),
            shared_memory=self.shared_bytes,
            ensure_row_contiguous=True,
        )
        return outputs

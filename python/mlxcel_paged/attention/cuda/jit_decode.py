"""The decode kernel compiled by MLX itself, with a launch's scalars as constants.

MLX copies and hashes the code of a precompiled kernel at every launch; of one that it compiles it hashes the source,
which is a few lines here, as the rest is included. On an H200 (2026-11-29, mlx 0.32.4, 320 chained launches, 4 rows of
4096 tokens) a launch costs the host 8.7 us this way and 23.5 us the other. The price is a compilation of two to three
seconds at each start, for every KV group.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxcel_paged.attention.cuda.kernel import Kernel, Scalar, Shape
from mlxcel_paged.kernels_cuda import KernelVariant
from mlxcel_paged.kernels_cuda.jit_header import jit_header

logger = logging.getLogger("mlxcel_paged")

CompiledKernel = Callable[..., list[mx.array]]

_INPUT_NAMES = (
    "q", "k_new", "v_new", "k_pages", "v_pages", "page_table", "lengths", "first_page_offsets", "work_items", "sinks",
    "rotations", "partial_out", "partial_state", "arrivals",
)  # fmt: skip
_BODY = """
  extern __shared__ __align__(128) char shared[];
  auto elements = [](const void* pointer) {{ return (mlxcel::u16*)pointer; }};
  auto floats = [](const void* pointer) {{ return (float*)pointer; }};
  mlxcel::DecodeArgs args = {{
      elements(q), elements(k_new), elements(v_new), elements(k_pages), elements(v_pages), page_table, lengths,
      first_page_offsets, work_items, floats(sinks), floats(rotations), floats(partial_out), floats(partial_state),
      const_cast<int*>(arrivals), elements(out), floats({lse}), {scalars}}};
  mlxcel::decode_worker(args, shared);
"""


@dataclass(frozen=True, slots=True)
class JitDecodeKernel:
    """A `Kernel` with the arguments of `paged_decode.cu`; compiled once for every set of scalars.

    Attributes:
        variant: Instantiation.
        precompiled: Serves where MLX cannot compile, as without CUDA's headers.
    """

    variant: KernelVariant
    precompiled: Kernel
    _compiled: dict[tuple[Any, ...], CompiledKernel | None] = field(default_factory=dict)

    def __call__(
        self,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Shape],
        output_dtypes: Sequence[mx.Dtype],
        scalars: Sequence[Scalar],
        num_blocks: tuple[int, int],
    ) -> list[mx.array]:
        num_threads = self.variant.num_threads
        arguments: dict[str, Any] = {
            # An lse that is not written is an input of the precompiled form, which this one does not have.
            "inputs": inputs[: len(_INPUT_NAMES)],
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "grid": (num_blocks[0] * num_threads, num_blocks[1], 1),
            "threadgroup": (num_threads, 1, 1),
        }
        key = (scalars, len(output_shapes))
        if key not in self._compiled:
            self._compiled[key] = self._compile(scalars, len(output_shapes) == 2, arguments)
        kernel = self._compiled[key]
        if kernel is None:
            return self.precompiled(inputs, output_shapes, output_dtypes, scalars, num_blocks)
        return kernel(**arguments)

    def _compile(self, scalars: Sequence[Scalar], with_lse: bool, arguments: dict[str, Any]) -> CompiledKernel | None:
        """Makes the kernel and compiles it by a launch, whose outcome is that of the launch that follows it."""
        text = ", ".join(f"{value!r}f" if isinstance(value, float) else str(value) for value in scalars)
        source = _BODY.format(lse="lse" if with_lse else "0", scalars=text)
        digest = hashlib.sha256(source.encode()).hexdigest()[:16]
        header = jit_header(
            "paged_decode.cu", num_threads=self.variant.num_threads, min_blocks=1, definitions=self.variant.definitions
        )
        started_at = time.perf_counter()
        make: Any = mx.fast.cuda_kernel
        kernel: CompiledKernel = make(
            name=f"{self.variant.name}_{digest}",
            input_names=list(_INPUT_NAMES),
            output_names=["lse", "out"] if with_lse else ["out"],
            header=header,
            source=source,
            shared_memory=self.variant.shared_bytes,
            ensure_row_contiguous=True,
        )
        try:
            mx.eval(kernel(**arguments))
        except RuntimeError as error:
            logger.warning("MLX cannot compile the decode kernel, launches will cost more: %s", error)
            return None
        logger.info("compiled the decode kernel %s in %.1f s", self.variant.name, time.perf_counter() - started_at)
        return kernel

"""Which instantiation of the CUDA decode kernel serves a shape, and the launch geometry that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP_SIZE = 16
PAGE_SIZES = (8, 16, 32, 64, 128)
ARCHITECTURES = ("sm_80", "sm_90a", "sm_120")

Dtype = Literal["float16", "bfloat16"]

ROPE_MULTIPLE = 16

_WARP_SIZE = 32
_SLICE_TOKENS = 16
_TILE_HEADS = 8
_KIB = 1024
_MIN_RING_BYTES = 64 * _KIB


def shared_limit(architecture: str) -> int:
    """Shared memory in bytes that one block may have on `architecture` (`"sm_90a"`, `"sm_80"`, ...)."""
    number = int(architecture.removeprefix("sm_").rstrip("af"))
    if number in (80, 87):
        return 163 * _KIB
    if 90 <= number < 120:
        return 227 * _KIB
    return 99 * _KIB


@dataclass(frozen=True, slots=True)
class RopeShape:
    """RoPE as far as the kernel's code depends on it.

    Attributes:
        dims: Leading dims that it turns, a multiple of `ROPE_MULTIPLE`.
        traditional: Pairs are neighbours, not half of `dims` apart.
    """

    dims: int
    traditional: bool


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One instantiation of `kernels/cuda/paged_decode.cu`.

    The sizes mirror `geometry.cuh`, which refuses to compile when the two disagree.
    """

    head_dim: int
    head_tiles: int
    dtype: Dtype
    architecture: str
    rope: RopeShape | None = None

    @classmethod
    def for_shape(
        cls, *, head_dim: int, group_size: int, dtype: Dtype, architecture: str, rope: RopeShape | None = None
    ) -> KernelVariant:
        """The variant that serves `group_size` query heads per KV head, and applies RoPE first if it is given.

        Raises:
            ValueError: `head_dim`, `group_size` or `rope` is outside what the kernel serves.
        """
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim must be one of {HEAD_DIMS}, got {head_dim}")
        if not 1 <= group_size <= MAX_GROUP_SIZE:
            raise ValueError(f"group_size must be in 1..{MAX_GROUP_SIZE}, got {group_size}")
        if rope is not None and (rope.dims % ROPE_MULTIPLE or not 0 < rope.dims <= head_dim):
            raise ValueError(f"rope must turn a multiple of {ROPE_MULTIPLE} dims, {head_dim} at most, got {rope.dims}")
        return cls(head_dim, -(-group_size // _TILE_HEADS), dtype, architecture, rope)

    @property
    def num_warps(self) -> int:
        warps = 4 if shared_limit(self.architecture) < 128 * _KIB else 8
        return warps // 2 if self.head_dim > 128 else warps

    @property
    def num_threads(self) -> int:
        """Threads of one block."""
        return self.num_warps * _WARP_SIZE

    @property
    def _fixed_bytes(self) -> int:
        exchange = self.num_warps * _TILE_HEADS * (self.head_dim + 4) * 4
        state = self.num_warps * _TILE_HEADS * self.head_tiles * 2 * 4
        return exchange + state + 16

    @property
    def _stage_bytes(self) -> int:
        return self.num_warps * 2 * _SLICE_TOKENS * self.head_dim * 2

    @property
    def num_stages(self) -> int:
        """Slices of 16 tokens that each warp's ring holds."""
        return max(2, -(-_MIN_RING_BYTES // self._stage_bytes))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block, bytes."""
        return self.num_stages * self._stage_bytes + self._fixed_bytes

    @property
    def name(self) -> str:
        """Unique among variants; holds everything that changes the code."""
        short = {"float16": "f16", "bfloat16": "bf16"}[self.dtype]
        rope = "" if self.rope is None else f"_{'t' if self.rope.traditional else 'r'}{self.rope.dims}"
        return f"paged_decode_{short}_d{self.head_dim}_h{self.head_tiles * _TILE_HEADS}{rope}_{self.architecture}"

    @property
    def definitions(self) -> tuple[str, ...]:
        """Preprocessor options for the compiler."""
        return (
            f"-DMLXCEL_HEAD_DIM={self.head_dim}",
            f"-DMLXCEL_HEAD_TILES={self.head_tiles}",
            f"-DMLXCEL_BF16={int(self.dtype == 'bfloat16')}",
            f"-DMLXCEL_ROPE_DIMS={0 if self.rope is None else self.rope.dims}",
            f"-DMLXCEL_ROPE_TRADITIONAL={int(self.rope is not None and self.rope.traditional)}",
            f"-DMLXCEL_SHARED_BYTES={self.shared_bytes}",
        )


def all_variants(architecture: str) -> list[KernelVariant]:
    """Every instantiation that `architecture` can be asked for."""
    return [
        KernelVariant(head_dim, head_tiles, dtype, architecture)
        for head_dim in HEAD_DIMS
        for head_tiles in (1, 2)
        for dtype in ("float16", "bfloat16")
    ]

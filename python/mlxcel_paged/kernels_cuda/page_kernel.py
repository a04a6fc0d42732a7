"""The CUDA kernels that move tokens between dense arrays and pages: their instantiations, and how to compile one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .nvrtc import Compiled, compile_file

PageOperation = Literal["page_write", "page_copy", "page_gather"]
PAGE_OPERATIONS: tuple[PageOperation, ...] = ("page_write", "page_copy", "page_gather")

_CHUNK_BYTES = (16, 8, 4, 2)


@dataclass(frozen=True, slots=True)
class PageKernel:
    """One instantiation of `kernels/cuda/<operation>.cu`.

    Attributes:
        chunk_bytes: What a thread moves at a time; divides the bytes of a row, that is of one token of one KV head.
    """

    operation: PageOperation
    chunk_bytes: int
    architecture: str

    @classmethod
    def for_row(cls, operation: PageOperation, row_bytes: int, architecture: str) -> PageKernel:
        """The instantiation with the widest chunks for rows of `row_bytes`.

        Raises:
            ValueError: `row_bytes` is odd.
        """
        for chunk_bytes in _CHUNK_BYTES:
            if row_bytes % chunk_bytes == 0:
                return cls(operation, chunk_bytes, architecture)
        raise ValueError(f"row_bytes must be even, got {row_bytes}")

    @property
    def name(self) -> str:
        """Unique among instantiations; holds everything that changes the code."""
        return f"{self.operation}_c{self.chunk_bytes}_{self.architecture}"

    @property
    def entry_point(self) -> str:
        """Symbol of the kernel in its cubin."""
        return f"mlxcel_{self.operation}"

    @property
    def definitions(self) -> tuple[str, ...]:
        """Preprocessor options for the compiler."""
        return (f"-DMLXCEL_CHUNK_BYTES={self.chunk_bytes}",)


def compile_page_kernel(kernel: PageKernel) -> Compiled:
    """Compiles one instantiation.

    Raises:
        CompileError: the source is refused.
        NvrtcNotFoundError: there is no NVRTC.
    """
    return compile_file(f"{kernel.operation}.cu", kernel.name, kernel.architecture, kernel.definitions)

"""CUDA decode kernel: its variants, their compilation, launch and work list. The kernel itself is in `kernels/cuda`."""

from .launch import WORKSPACE_FILL, CudaFunction, DecodeArguments, DecodeKernel
from .nvrtc import ENTRY_POINT, Compiled, CompileError, NvrtcNotFoundError, compile_source, compile_variant, source_dir
from .variant import ARCHITECTURES, HEAD_DIMS, PAGE_SIZES, KernelVariant, all_variants, shared_limit
from .work_list import FLAG_OPEN_END, FLAG_VALID, ITEM_FIELDS, WorkList, balanced_work_list

__all__ = [
    "ARCHITECTURES",
    "ENTRY_POINT",
    "FLAG_OPEN_END",
    "FLAG_VALID",
    "HEAD_DIMS",
    "ITEM_FIELDS",
    "PAGE_SIZES",
    "WORKSPACE_FILL",
    "CompileError",
    "Compiled",
    "CudaFunction",
    "DecodeArguments",
    "DecodeKernel",
    "KernelVariant",
    "NvrtcNotFoundError",
    "WorkList",
    "all_variants",
    "balanced_work_list",
    "compile_source",
    "compile_variant",
    "shared_limit",
    "source_dir",
]

"""NVRTC through ctypes: CUDA source to cubin, with the compiler's resource report."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .variant import KernelVariant

ENTRY_POINT = "mlxcel_paged_decode"


class NvrtcNotFoundError(RuntimeError):
    """No NVRTC library on this machine."""


class CompileError(RuntimeError):
    """NVRTC refused the source; `.log` holds its messages."""

    def __init__(self, name: str, log: str) -> None:
        super().__init__(f"{name} does not compile:\n{log}")
        self.log = log


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled variant.

    Attributes:
        cubin: machine code for one architecture.
        log: everything the compiler said.
        num_registers: registers a thread.
        spill_bytes: bytes of spill stores and loads a thread.
        stack_bytes: bytes of local memory a thread.
    """

    cubin: bytes
    log: str
    num_registers: int
    spill_bytes: int
    stack_bytes: int


def source_dir() -> Path:
    """Folder of the kernel sources: inside an installed package, or `kernels/cuda` of a checkout."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "cuda", *(parent / "kernels" / "cuda" for parent in here.parents)):
        if (candidate / "paged_decode.cu").is_file():
            return candidate
    raise FileNotFoundError("kernels/cuda/paged_decode.cu is neither in the package nor in a checkout around it")


@cache
def load_library() -> ctypes.CDLL:
    """NVRTC from PyPI's wheels (`nvidia-cuda-nvrtc`, CUDA 12 or 13), else the system's.

    Raises:
        NvrtcNotFoundError: there is none.
    """
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    found = [
        library
        for folder in folders
        for pattern in ("cu13/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*")
        for library in sorted(folder.glob(pattern))
        if ".alt." not in library.name
    ]
    for name in (*map(str, found), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            # The wheel's library looks for its built-in headers by name only, so they are loaded from beside it first.
            if name.startswith("/"):
                for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NvrtcNotFoundError("libnvrtc was not found; install it with: pip install nvidia-cuda-nvrtc")


def compile_variant(variant: KernelVariant, *, extra_options: tuple[str, ...] = ()) -> Compiled:
    """Compiles `kernels/cuda/paged_decode.cu` for one variant.

    Raises:
        CompileError: the source is refused.
        NvrtcNotFoundError: there is no NVRTC.
    """
    return compile_file("paged_decode.cu", variant.name, variant.architecture, (*variant.definitions, *extra_options))


def compile_file(file_name: str, name: str, architecture: str, options: tuple[str, ...] = ()) -> Compiled:
    """Compiles one file of `kernels/cuda`; `name` stands in the compiler's messages.

    Raises:
        CompileError: the source is refused.
        NvrtcNotFoundError: there is no NVRTC.
    """
    source = (source_dir() / file_name).read_bytes()
    return compile_source(name, source, (*_file_options(architecture), *options))


def _file_options(architecture: str) -> tuple[str, ...]:
    return (
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "--ptxas-options=-v",
        f"--include-path={source_dir()}",
    )


def version() -> tuple[int, int]:
    """Major and minor version of the compiler.

    Raises:
        NvrtcNotFoundError: there is no NVRTC.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(load_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "version query")
    return major.value, minor.value


def compile_source(name: str, source: bytes, options: tuple[str, ...]) -> Compiled:
    """Compiles one source to a cubin. `options` are NVRTC's; ask for `--ptxas-options=-v` to get the resource report.

    Raises:
        CompileError: the source is refused.
        NvrtcNotFoundError: there is no NVRTC.
    """
    library = load_library()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None), name)
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), array)
        log = _fetch(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
        if status != 0:
            raise CompileError(name, log)
        cubin = _fetch(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    stack, stores, loads = _numbers(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    (registers,) = _numbers(r"Used (\d+) registers", log)
    return Compiled(cubin, log, registers, stores + loads, stack)


def _numbers(pattern: str, log: str) -> list[int]:
    match = re.search(pattern, log)
    return [int(group) for group in match.groups()] if match else [-1] * re.compile(pattern).groups


def _fetch(size_of: Callable[..., int], fetch: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)), "size query")
    buffer = ctypes.create_string_buffer(size.value)
    _check(fetch(program, buffer), "result query")
    return buffer.raw


def _check(status: int, what: str) -> None:
    if status != 0:
        raise RuntimeError(f"NVRTC failed on {what} with status {status}")

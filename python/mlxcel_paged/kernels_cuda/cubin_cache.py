"""Compiled kernels on disk: NVRTC takes seconds a kernel, and a server should not pay them at every start.

An entry is named by everything that decides its contents: the sources, the options and the compiler. It carries its
own digest, so that one that was cut short or damaged is compiled anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from mlxcel_paged.kernels_cuda import nvrtc

logger = logging.getLogger("mlxcel_paged")

_DIGEST_BYTES = hashlib.sha256().digest_size


def cached_cubin(
    file_name: str, name: str, architecture: str, options: tuple[str, ...] = (), *, cache_dir: Path
) -> bytes:
    """Returns the machine code of one file of `kernels/cuda`, compiled now or before.

    Args:
        file_name: file in `kernels/cuda`.
        name: what the kernel is called in messages and in the cache.
        architecture: as `KernelVariant.architecture`.
        options: the compiler's further options.
        cache_dir: folder of the cache; made when missing. A folder that cannot be written is no error.

    Raises:
        CompileError, NvrtcNotFoundError: it cannot be compiled.
    """
    path = cache_dir / "cubin" / f"{name}-{_key(file_name, architecture, options)}.cubin"
    found = _read(path)
    if found is not None:
        return found
    logger.info("compiling the CUDA kernel %s", name)
    cubin = nvrtc.compile_file(file_name, name, architecture, options).cubin
    try:
        _write(path, cubin)
    except OSError as error:
        logger.warning("the compiled kernel %s is not kept: %s", name, error)
    return cubin


def _key(file_name: str, architecture: str, options: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((file_name, architecture, options, nvrtc.version())).encode())
    for source in sorted(nvrtc.source_dir().glob("*.cu*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write(path: Path, cubin: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

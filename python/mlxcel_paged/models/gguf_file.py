"""Reads the container format of a GGUF file: metadata and the place of every tensor.

The `gguf` package's reader builds one NumPy view per metadata element, which takes seconds for a vocabulary; this one
walks the header once. Tensor bytes stay memory-mapped. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from mlxcel_paged.errors import InvalidModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: `shape` in row-major order (the file's own order is reversed), `data` its raw bytes."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Metadata by key, and tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Reads the header of the GGUF file at `path` and maps its tensors.

    Raises:
        InvalidModelError: The file is not GGUF version 2 or 3 (little-endian), is truncated, or is inconsistent.
    """
    with path.open("rb") as file:
        try:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise InvalidModelError(f"{path}: not a GGUF file, it is empty") from None
    header = _Header(buffer, path)
    try:
        return _read(header, path)
    except (struct.error, IndexError, RecursionError) as error:
        raise InvalidModelError(f"{path}: the file ends inside its header, at byte {header.at}") from error
    except UnicodeDecodeError as error:
        raise InvalidModelError(f"{path}: a string before byte {header.at} is not UTF-8") from error


def _read(header: _Header, path: Path) -> GGUFFile:
    if header.take(4) != _MAGIC:
        raise InvalidModelError(f"{path}: not a GGUF file, its first bytes differ from {_MAGIC.decode()}")
    version = header.scalar(4)
    if version not in _VERSIONS:
        raise InvalidModelError(f"{path}: GGUF version {version}; versions 2 and 3 (little-endian) can be read")
    num_tensors, num_keys = header.scalar(10), header.scalar(10)
    metadata = {}
    for _ in range(num_keys):
        key = header.string()
        metadata[key] = header.value(header.scalar(4))
    places = []
    for _ in range(num_tensors):
        name = header.string()
        shape = tuple(header.scalar(10) for _ in range(header.scalar(4)))[::-1]
        places.append((name, shape, header.scalar(4), header.scalar(10)))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise InvalidModelError(f"{path}: general.alignment must be a positive integer: {alignment!r}")
    start = -(-header.at // alignment) * alignment
    tensors = {name: _tensor(header, name, shape, kind, start + offset) for name, shape, kind, offset in places}
    return GGUFFile(path, metadata, tensors)


def _tensor(header: _Header, name: str, shape: tuple[int, ...], kind_id: int, begin: int) -> GGUFTensor:
    try:
        kind = GGMLQuantizationType(kind_id)
    except ValueError:
        raise InvalidModelError(f"{header.path}: tensor {name} has an unknown type: {kind_id}") from None
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block_elements:
        raise InvalidModelError(f"{header.path}: rows of tensor {name} are no multiple of {block_elements}: {shape}")
    row_bytes = shape[-1] // block_elements * block_bytes
    num_rows = 1
    for extent in shape[:-1]:
        num_rows *= extent
    if begin + num_rows * row_bytes > len(header.buffer):
        raise InvalidModelError(f"{header.path}: the file ends inside tensor {name}")
    data = np.frombuffer(header.buffer, np.uint8, num_rows * row_bytes, begin)
    return GGUFTensor(name, shape, kind, data.reshape(*shape[:-1], row_bytes))


class _Header:
    """A cursor over the mapped file; every read is bounds-checked by `struct` or by `take`."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.at = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.at + num_bytes
        if end > len(self.buffer):
            raise IndexError(end)
        taken = self.buffer[self.at : end]
        self.at = end
        return taken

    def scalar(self, kind: int) -> Any:
        form = _SCALARS[kind]
        (value,) = struct.unpack_from(form, self.buffer, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        return self.take(self.scalar(10)).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar(4), self.scalar(10)
            if item in (_STRING, _ARRAY):
                return [self.value(item) for _ in range(count)]
            return self._scalars(item, count)
        if kind not in _SCALARS:
            raise InvalidModelError(f"{self.path}: unknown metadata type {kind} before byte {self.at}")
        return self.scalar(kind)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise InvalidModelError(f"{self.path}: unknown metadata type {kind} before byte {self.at}")
        raw = self.take(count * struct.calcsize(_SCALARS[kind]))
        values: list[Any] = np.frombuffer(raw, np.dtype(_SCALARS[kind])).tolist()
        return values

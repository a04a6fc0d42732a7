"""Checks the arguments of the public attention functions. One place; every error names its argument.

Index arguments become contiguous int32 NumPy arrays here; nothing downstream sees a caller's dtype or stride.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_paged.errors import InvalidArgumentError, InvalidTypeError

IndexArray = Any  # NumPy or MLX array, or a sequence of ints
Tensor = Any  # NumPy or MLX array

_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_MAX_INT32 = 2**31 - 1
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
LAYOUTS = ("NHD", "HND")


@dataclass(frozen=True, slots=True)
class Csr:
    """The CSR view of a batch as contiguous int32 NumPy arrays."""

    indptr: Any  # [batch + 1]
    indices: Any  # [indptr[batch]]
    last_page_len: Any  # [batch]
    first_page_offset: Any  # [batch]

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.last_page_len)


def invalid(argument: str, message: str) -> InvalidArgumentError:
    """An error about the value of `argument`."""
    error = InvalidArgumentError(f"invalid {argument}: {message}")
    error.argument = argument
    return error


def invalid_type(argument: str, message: str) -> InvalidTypeError:
    """An error about the type or dtype of `argument`."""
    error = InvalidTypeError(f"invalid type of {argument}: {message}")
    error.argument = argument
    return error


def index_array(argument: str, value: IndexArray, num_used: int | None = None) -> np.ndarray[Any, Any]:
    """Returns `value` as contiguous int32 `[n]`; accepts int32 and int64, NumPy, MLX or a sequence, strided or not.

    Of a value that is longer than `num_used`, the rest may hold anything.
    """
    if isinstance(value, mx.array):
        if value.dtype not in (mx.int32, mx.int64):
            raise invalid_type(argument, f"expected int32 or int64, got {value.dtype}")
        array = np.array(value)
    elif isinstance(value, np.ndarray):
        if value.dtype not in (np.int32, np.int64):
            raise invalid_type(argument, f"expected int32 or int64, got {value.dtype}")
        array = value
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        array = _integers(argument, value[:num_used])
    else:
        raise invalid_type(argument, f"expected an integer array or a sequence of ints, got {type(value).__name__}")
    if array.ndim != 1:
        raise invalid(argument, f"expected one dimension, got shape {array.shape}")
    array = array[:num_used]
    if array.size and (array.min() < 0 or array.max() > _MAX_INT32):
        raise invalid(argument, f"values must be between 0 and {_MAX_INT32}: {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, np.int32)


def csr(
    indptr: IndexArray,
    indices: IndexArray,
    last_page_len: IndexArray,
    first_page_offset: IndexArray | None,
    *,
    num_pages: int,
    page_size: int,
    batch: int | None = None,
) -> Csr:
    """Checks every invariant of the CSR view of `batch` rows (None: as many as `indptr` says)."""
    pointers = index_array("indptr", indptr)
    last = index_array("last_page_len", last_page_len)
    if not len(pointers):
        raise invalid("indptr", "is empty; a batch of no rows is [0]")
    rows = len(pointers) - 1 if batch is None else batch
    first = (
        np.zeros(rows, np.int32) if first_page_offset is None else index_array("first_page_offset", first_page_offset)
    )
    for argument, array, expected in (
        ("indptr", pointers, rows + 1),
        ("last_page_len", last, rows),
        ("first_page_offset", first, rows),
    ):
        if len(array) != expected:
            raise invalid(argument, f"expected {expected} entries for {rows} rows, got {len(array)}")
    if pointers[0] != 0:
        raise invalid("indptr", f"must begin with 0: {pointers[0]}")
    counts = np.diff(pointers.astype(np.int64))
    if (counts < 0).any():
        raise invalid("indptr", f"must not decrease, but does after entry {int(np.argmax(counts < 0))}")
    used = index_array("indices", indices, int(pointers[-1]))
    if pointers[-1] > len(used):
        raise invalid("indices", f"has {len(used)} entries, but indptr ends at {pointers[-1]}")
    if used.size and used.max() >= num_pages:
        raise invalid("indices", f"page {used.max()} is outside the pool of {num_pages} pages")
    _check_rows(counts, last, first, page_size)
    return Csr(pointers, used, last, first)


def _check_rows(
    counts: np.ndarray[Any, Any], last: np.ndarray[Any, Any], first: np.ndarray[Any, Any], page_size: int
) -> None:
    holds = counts > 0
    bad_last = np.where(holds, (last < 1) | (last > page_size), last != 0)
    if bad_last.any():
        row = int(np.argmax(bad_last))
        expected = f"between 1 and {page_size}" if holds[row] else "0 for a row without pages"
        raise invalid("last_page_len", f"row {row} must be {expected}: {last[row]}")
    end_of_first = np.where(counts == 1, last, page_size)
    bad_first = np.where(holds, first >= end_of_first, first != 0)
    if bad_first.any():
        row = int(np.argmax(bad_first))
        expected = f"below {end_of_first[row]}" if holds[row] else "0 for a row without pages"
        raise invalid("first_page_offset", f"row {row} must be {expected}: {first[row]}")


def tensor(argument: str, value: Tensor, ndim: int) -> mx.array:
    """Returns a floating-point array as an MLX array; NumPy arrays are copied."""
    if isinstance(value, np.ndarray):
        if value.dtype not in (np.float32, np.float16):
            raise invalid_type(argument, f"expected float32 or float16 (bfloat16 as an MLX array), got {value.dtype}")
        value = mx.array(np.ascontiguousarray(value))  # MLX takes no negative strides
    if not isinstance(value, mx.array):
        raise invalid_type(argument, f"expected an MLX or NumPy array, got {type(value).__name__}")
    if value.dtype not in _FLOATS:
        raise invalid_type(argument, f"expected float32, float16 or bfloat16, got {value.dtype}")
    if value.ndim != ndim:
        raise invalid(argument, f"expected {ndim} dimensions, got shape {value.shape}")
    return value


def layout_name(value: Any) -> str:
    """Checks the pool layout."""
    return one_of("layout", value, LAYOUTS)


def one_of(argument: str, value: Any, names: Sequence[str]) -> str:
    """Checks a name."""
    if not isinstance(value, str) or value not in names:
        raise invalid(argument, f"must be one of {', '.join(names)}: {value!r}")
    return value


def pages(k_pages: Tensor, v_pages: Tensor) -> tuple[mx.array, mx.array]:
    """Checks a pair of pools."""
    keys, values = tensor("k_pages", k_pages, 4), tensor("v_pages", v_pages, 4)
    if values.shape != keys.shape:
        raise invalid("v_pages", f"shape {values.shape} differs from k_pages' {keys.shape}")
    if values.dtype != keys.dtype:
        raise invalid_type("v_pages", f"dtype {values.dtype} differs from k_pages' {keys.dtype}")
    if 0 in keys.shape:
        raise invalid("k_pages", f"is empty: shape {keys.shape}")
    return keys, values


def heads(argument: str, num_qo_heads: int, num_kv_heads: int) -> None:
    """Checks grouped-query geometry."""
    if num_kv_heads < 1 or num_qo_heads < 1 or num_qo_heads % num_kv_heads:
        raise invalid(argument, f"{num_qo_heads} query heads are no multiple of {num_kv_heads} KV heads")


def window(value: Any) -> int | None:
    """Checks a window: None for off, else visible tokens, the current one included."""
    return None if value is None else _at_least("window", value, 1)


def num_splits(value: Any) -> int | None:
    """Checks the upper bound of splits per request."""
    return None if value is None else _at_least("num_splits", value, 1)


def positive(argument: str, value: Any) -> int:
    """Checks a count of 1 or more."""
    return _at_least(argument, value, 1)


def index(argument: str, value: Any, bound: int) -> int:
    """Checks an index: 0 or more and below `bound`."""
    number = _integer(argument, value)
    if not 0 <= number < bound:
        raise invalid(argument, f"must be between 0 and {bound - 1}: {number}")
    return number


def flag(argument: str, value: Any) -> bool:
    """Checks a bool."""
    if not isinstance(value, bool | np.bool_):
        raise invalid_type(argument, f"expected a bool, got {type(value).__name__}")
    return bool(value)


def logits_soft_cap(value: Any) -> float:
    """Checks the cap on logits: 0 for off."""
    number = _real("logits_soft_cap", value)
    if number < 0:
        raise invalid("logits_soft_cap", f"must be 0 (off) or more: {number}")
    return number


def sm_scale(value: Any, head_dim: int) -> float:
    """Checks the factor on logits; None means `head_dim ** -0.5`."""
    return head_dim**-0.5 if value is None else _real("sm_scale", value)


def sinks(value: Tensor | None, num_qo_heads: int, q_dtype: mx.Dtype) -> mx.array | None:
    """Checks attention sinks, `[num_qo_heads]`, float32 or the queries' dtype."""
    if value is None:
        return None
    array = tensor("sinks", value, 1)
    if array.shape != (num_qo_heads,):
        raise invalid("sinks", f"expected one per query head, {num_qo_heads}: got {array.shape[0]}")
    if array.dtype not in (mx.float32, q_dtype):
        raise invalid_type("sinks", f"expected float32 or the queries' {q_dtype}, got {array.dtype}")
    return array


def _integers(argument: str, values: Sequence[Any]) -> np.ndarray[Any, Any]:
    integers = [_integer(argument, value) for value in values]
    try:
        return np.array(integers, np.int64)
    except OverflowError:
        raise invalid(argument, f"values must be between 0 and {_MAX_INT32}") from None


def _integer(argument: str, value: Any) -> int:
    if isinstance(value, bool | np.bool_):
        raise invalid_type(argument, "expected an int, got a bool")
    try:
        return operator.index(value)
    except TypeError:
        raise invalid_type(argument, f"expected an int, got {type(value).__name__}") from None


def _at_least(argument: str, value: Any, least: int) -> int:
    number = _integer(argument, value)
    if not least <= number <= _MAX_INT32:
        raise invalid(argument, f"must be between {least} and {_MAX_INT32}: {number}")
    return number


def _real(argument: str, value: Any) -> float:
    if isinstance(value, bool | str | bytes):
        raise invalid_type(argument, f"expected a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        raise invalid(argument, "must be finite in float32") from None
    except (TypeError, ValueError):
        raise invalid_type(argument, f"expected a number, got {type(value).__name__}") from None
    if not abs(number) <= _MAX_FLOAT32:
        raise invalid(argument, f"must be finite in float32: {number}")
    return number

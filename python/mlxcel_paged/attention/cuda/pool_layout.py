"""How a launch's arrays lie in device memory.

MLX does not tell an array's strides, and asking for its buffer would move it to the host. Arrays of one element begin
where that element is, so a launch that reports their addresses tells strides and alignment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxcel_paged.attention import validation
from mlxcel_paged.attention.cuda.kernel import Kernel

_NUM_CORNERS = 5
_CHUNK_BYTES = 16  # the kernel moves whole chunks
_MAX_INT32 = 2**31 - 1


class PoolStrides(NamedTuple):
    """Elements from a page, head or token of a pool to the next. Part of a key that every launch hashes."""

    page: int
    head: int
    token: int

    @classmethod
    def dense(cls, layout: str, *, num_kv_heads: int, page_size: int, head_dim: int) -> PoolStrides:
        """The strides of a pool without gaps in `layout`, `NHD` or `HND`."""
        page = num_kv_heads * page_size * head_dim
        if layout == "NHD":
            return cls(page, head_dim, num_kv_heads * head_dim)
        return cls(page, page_size * head_dim, head_dim)


@dataclass(frozen=True, slots=True)
class Placed:
    """Arrays as the kernel can take them.

    Attributes:
        rows: Queries, new keys and new values, 16-byte aligned.
        k_view, v_view: Contiguous, beginning where the pools do.
        strides: Of both pools.
    """

    rows: tuple[mx.array, mx.array, mx.array]
    k_view: mx.array
    v_view: mx.array
    strides: PoolStrides


def place(
    rows: tuple[mx.array, mx.array, mx.array],
    k_pages: mx.array,
    v_pages: mx.array,
    layout: str,
    kernel: Kernel,
    *,
    in_place: bool,
) -> Placed:
    """Finds out how the arrays lie, and copies what the kernel cannot take as it is. Waits for the device.

    Args:
        rows: Queries, new keys and new values, `[batch, heads, head_dim]`.
        kernel: `mlxcel_array_addresses`.
        in_place: The pools are to be written, so they must not be copied.

    Raises:
        InvalidArgumentError: A pool cannot be written in place as it lies in memory.
    """
    corners = [*(array[:1, :1, :1] for array in rows), *_corners(k_pages), *_corners(v_pages)]
    (on_device,) = kernel(corners, ((len(corners),),), (mx.int64,), (), (1, 1))
    mx.eval(on_device)
    addresses = np.array(on_device)
    k_addresses, v_addresses = addresses[len(rows) :][:_NUM_CORNERS], addresses[len(rows) + _NUM_CORNERS :]
    queries, k_new, v_new = (
        _copy(array) if address % _CHUNK_BYTES else array
        for array, address in zip(rows, addresses[: len(rows)], strict=True)
    )
    aligned = (queries, k_new, v_new)
    strides, v_strides = _strides(k_pages, k_addresses, layout), _strides(v_pages, v_addresses, layout)
    fault = _fault("k_pages", k_pages, k_addresses, strides, layout) or _fault(
        "v_pages", v_pages, v_addresses, v_strides, layout
    )
    if fault is None and strides != v_strides:
        fault = ("v_pages", f"{v_strides} differ from k_pages' {strides}")
    if fault is None and in_place and v_addresses[0] == k_addresses[0]:
        fault = ("v_pages", "overlaps the memory of k_pages")
    if fault is None:
        return Placed(aligned, k_pages[0, 0, 0], v_pages[0, 0, 0], strides)
    if in_place:
        raise validation.invalid(*fault)
    return Placed(aligned, _copy(k_pages), _copy(v_pages), _dense(k_pages, layout))


def _corners(pool: mx.array) -> Iterator[mx.array]:
    """Element 0, then along each axis the element after it, or 0 again."""
    yield pool[:1, :1, :1, :1]
    for axis, size in enumerate(pool.shape):
        begins = [1 if other == axis and size > 1 else 0 for other in range(4)]
        yield pool[tuple(slice(begin, begin + 1) for begin in begins)]


def _copy(array: mx.array) -> mx.array:
    """A copy without gaps, in memory of its own. MLX's own copy may share the memory."""
    return mx.contiguous(array * 1)


def _axes(layout: str) -> tuple[int, int]:
    """The axes of heads and tokens."""
    return (2, 1) if layout == "NHD" else (1, 2)


def _dense(pool: mx.array, layout: str) -> PoolStrides:
    heads, tokens = _axes(layout)
    return PoolStrides.dense(
        layout, num_kv_heads=pool.shape[heads], page_size=pool.shape[tokens], head_dim=pool.shape[3]
    )


def _strides(pool: mx.array, addresses: Any, layout: str) -> PoolStrides:
    """Strides from the addresses of the corners; those of axes of one element are as if there were no gaps."""
    heads, tokens = _axes(layout)
    dense = _dense(pool, layout)
    by_axis = [int(address - addresses[0]) // pool.itemsize for address in addresses[1:]]
    return PoolStrides(
        by_axis[0] if pool.shape[0] > 1 else dense.page,
        by_axis[heads] if pool.shape[heads] > 1 else dense.head,
        by_axis[tokens] if pool.shape[tokens] > 1 else dense.token,
    )


def _fault(argument: str, pool: mx.array, addresses: Any, strides: PoolStrides, layout: str) -> tuple[str, str] | None:
    """Why the kernel cannot address the pool where it is, with the argument's name."""
    heads, tokens = _axes(layout)
    if int(addresses[4] - addresses[0]) != pool.itemsize:
        return argument, "the head_dim axis must be contiguous to write new tokens in place"
    chunk = _CHUNK_BYTES // pool.itemsize
    if addresses[0] % _CHUNK_BYTES or strides.page % chunk or strides.head % chunk or strides.token % chunk:
        return argument, f"rows must begin at multiples of {_CHUNK_BYTES} bytes to write new tokens in place: {strides}"
    reach = (pool.shape[heads] - 1) * strides.head + (pool.shape[tokens] - 1) * strides.token + pool.shape[3]
    if min(strides.page, strides.head, strides.token) < 1 or max(strides.page, reach) > _MAX_INT32:
        return argument, f"strides must be positive and a page within {_MAX_INT32} elements: {strides}"
    return None

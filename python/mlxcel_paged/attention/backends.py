"""Runs one validated decode call on a named backend."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlxcel_paged import _core
from mlxcel_paged.attention import validation
from mlxcel_paged.attention.cpu import CARRIER, to_mlx
from mlxcel_paged.attention.decode_call import DecodeCall, Result
from mlxcel_paged.attention.gather import gather_decode, gather_index
from mlxcel_paged.attention.reference import reference_decode


def run_cpu(plan: _core.DecodePlan, call: DecodeCall, k_new: mx.array | None, v_new: mx.array | None) -> Result:
    """Runs the fused CPU kernel on `plan`, appending `k_new` and `v_new` first if given."""
    inputs = [call.q, call.k_pages, call.v_pages, k_new, v_new, call.sinks]
    mx.eval([array for array in inputs if array is not None])
    q, k_pages, v_pages = (dim_contiguous(array) for array in (call.q, call.k_pages, call.v_pages))
    out = np.empty(call.q.shape, CARRIER[call.q.dtype])
    lse = np.empty(call.q.shape[:2], np.float32) if call.return_lse else None
    _core.cpu_paged_decode(
        plan,
        q,
        out,
        k_pages,
        v_pages,
        lse=lse,
        k_new=k_new,
        v_new=v_new,
        layout=call.layout,
        sm_scale=call.sm_scale,
        logits_soft_cap=call.logits_soft_cap,
        sinks=call.sinks,
    )
    return to_mlx(out, call.q.dtype), None if lse is None else mx.array(lse)


def is_dim_contiguous(array: mx.array) -> bool:
    """Whether the elements of one head follow each other in memory. Evaluates `array`."""
    mx.eval(array)
    strides = memoryview(cast(Any, array)).strides
    return strides is not None and strides[-1] == array.itemsize


def dim_contiguous(array: mx.array) -> mx.array:
    """Returns `array`, or a copy in which the elements of one head follow each other; evaluated."""
    if is_dim_contiguous(array):
        return array
    copy = mx.contiguous(array)
    mx.eval(copy)
    return copy


def run_gather(csr: validation.Csr, call: DecodeCall) -> Result:
    """Gathers pages and runs MLX's attention."""
    if call.row_by_row and csr.batch > 1:
        parts = [_gather_rows(csr, call, row, row + 1) for row in range(csr.batch)]
        lse = [part[1] for part in parts if part[1] is not None]
        return mx.concatenate([part[0] for part in parts]), mx.concatenate(lse) if lse else None
    return _gather_rows(csr, call, 0, csr.batch)


def _gather_rows(csr: validation.Csr, call: DecodeCall, begin: int, end: int) -> Result:
    rows = [csr.indices[csr.indptr[row] : csr.indptr[row + 1]] for row in range(begin, end)]
    counts = np.array([len(row) for row in rows])
    first = csr.first_page_offset[begin:end]
    lengths = np.where(counts > 0, (counts - 1) * call.page_size + csr.last_page_len[begin:end] - first, 0)
    index = gather_index(rows, first, lengths, call.page_size, call.window)
    out, lse = gather_decode(
        call.q[begin:end, :, None],
        call.k_pages,
        call.v_pages,
        index,
        layout=call.layout,
        scale=call.sm_scale,
        sinks=call.sinks,
        logits_soft_cap=call.logits_soft_cap,
        return_lse=call.return_lse,
    )
    return out[:, :, 0], lse


def run_reference(csr: validation.Csr, call: DecodeCall) -> Result:
    """Runs the float64 oracle and rounds its result."""
    out, lse = reference_decode(
        _float64(call.q),
        _float64(call.k_pages),
        _float64(call.v_pages),
        indptr=csr.indptr,
        indices=csr.indices,
        last_page_len=csr.last_page_len,
        first_page_offset=csr.first_page_offset,
        sm_scale=call.sm_scale,
        window=call.window,
        logits_soft_cap=call.logits_soft_cap,
        sinks=None if call.sinks is None else _float64(call.sinks),
        layout=call.layout,
    )
    rounded = mx.array(out.astype(np.float32)).astype(call.q.dtype)
    return rounded, mx.array(lse.astype(np.float32)) if call.return_lse else None


def _float64(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32)).astype(np.float64)

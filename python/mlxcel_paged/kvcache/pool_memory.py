"""Prepares the memory of a pool: untouched until used, and in huge pages where the system has them.

MLX writes the zeros of `mx.zeros`, so a pool would cost its whole size at start. On Linux, private anonymous memory
that is advised `MADV_DONTNEED` reads as zeros again and is only backed when touched: same contents, no memory.
A launch reads runs of a few KiB all over a pool, so address translation costs a tenth of the bandwidth with pages of
4 KiB (`mlxcel-paged bench kernel`); `MADV_HUGEPAGE` asks for pages of 2 MiB.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import mlx.core as mx
import numpy as np

_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14


def prepare_zeroed(array: mx.array) -> bool:
    """Gives back the whole memory pages inside `array`, which must be evaluated, zero, and on the CPU.

    Returns:
        Whether memory was given back; the array is all zeros either way.
    """
    if not sys.platform.startswith("linux"):
        return False
    view = np.asarray(array.view(mx.uint8))
    page = mmap.PAGESIZE
    begin = -(-view.ctypes.data // page) * page
    end = (view.ctypes.data + view.nbytes) // page * page
    if end <= begin:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    memory = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
    libc.madvise(*memory, _MADV_HUGEPAGE)  # a wish: systems without huge pages refuse it
    return bool(libc.madvise(*memory, _MADV_DONTNEED) == 0)

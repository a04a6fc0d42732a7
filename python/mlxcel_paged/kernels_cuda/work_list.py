"""Balanced work list of one decode step in the kernel's form: every worker gets the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ITEM_FIELDS = ("slot", "kv_begin", "kv_end", "flags", "out_row", "split", "num_splits", "partial_row")
FLAG_VALID = 1
FLAG_OPEN_END = 2


@dataclass(frozen=True, slots=True)
class WorkList:
    """Attributes:
    items: int32 [num_workers * items_per_worker, 8], fields as in `ITEM_FIELDS`. Worker w runs rows w, w + num_workers,
        ... and stops at the first one without `FLAG_VALID`.
    num_workers: workers per KV head; the grid is num_workers * num_kv_heads blocks.
    num_partial_rows: rows of the workspace in use; at most two a worker when nothing bounds the splits.
    """

    items: NDArray[np.int32]
    num_workers: int
    num_partial_rows: int


def balanced_work_list(
    lengths: Sequence[int],
    *,
    num_workers: int,
    quantum: int = 128,
    min_quanta: int = 1,
    offsets: Sequence[int] | None = None,
    window: int | None = None,
    num_splits: int | None = None,
    slots: Sequence[int] | None = None,
) -> WorkList:
    """Lays the rows end to end and cuts them into `num_workers` equal stretches (Stream-K over tokens).

    Args:
        lengths: tokens held by each batch row, the current one included.
        quantum: tokens between possible cuts, counted from the start of a row's first page: what all warps of a block
            consume in one turn.
        min_quanta: fewest quanta for which one more worker is used.
        offsets: first_page_offset of each row.
        window: visible tokens of each row, None for all.
        num_splits: upper bound of the items of a row.
        slots: slot of each batch row; the row index itself when None.
    """
    offsets = [0] * len(lengths) if offsets is None else offsets
    begins = [max(0, length - window) if window else 0 for length in lengths]
    first = [(begin + offset) // quantum for begin, offset in zip(begins, offsets, strict=True)]
    quanta = [
        -(-(length + offset) // quantum) - start if length > 0 else 0
        for length, offset, start in zip(lengths, offsets, first, strict=True)
    ]
    order = sorted(range(len(lengths)), key=lambda row: -quanta[row])
    total = sum(quanta)
    used = max(1, min(num_workers, total // min_quanta))
    ends = _stretch_ends([quanta[row] for row in order], used)

    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(num_workers)]  # of each worker: row, begin, end
    worker, position = 0, 0
    for row in order:
        start, left = 0, quanta[row]
        cuts = 1
        while True:
            while worker < used - 1 and position >= ends[worker]:
                worker += 1
            room = ends[worker] - position if worker < used - 1 else left
            take = left if num_splits is not None and cuts >= num_splits else min(left, room)
            pieces[worker].append((row, start, start + take))
            position, start, left = position + take, start + take, left - take
            cuts += 1
            if left == 0:
                break

    counts = np.zeros(len(lengths), np.int64)
    for row, _, _ in (piece for stretch in pieces for piece in stretch):
        counts[row] += 1
    bases = np.where(counts > 1, np.cumsum(np.where(counts > 1, counts, 0)) - counts, 0)
    seen = np.zeros(len(lengths), np.int64)
    records: list[list[list[int]]] = []
    for stretch in pieces:
        mine = []
        for row, start, end in stretch:
            last = end == quanta[row]
            kv_begin = begins[row] if start == 0 else (first[row] + start) * quantum - offsets[row]
            kv_end = lengths[row] if last else (first[row] + end) * quantum - offsets[row]
            flags = FLAG_VALID | (FLAG_OPEN_END if last else 0)
            slot = row if slots is None else slots[row]
            mine.append(
                [slot, kv_begin, kv_end, flags, row, int(seen[row]), int(counts[row]), int(bases[row] + seen[row])]
            )
            seen[row] += 1
        # Shared rows first: their merge then happens while the block still has work in flight.
        mine.sort(key=lambda record: record[6] == 1)
        records.append(mine)
    depth = max([1, *map(len, records)])
    items = np.zeros((depth, num_workers, len(ITEM_FIELDS)), np.int32)
    for index, mine in enumerate(records):
        for place, record in enumerate(mine):
            items[place, index] = record
    return WorkList(items.reshape(-1, len(ITEM_FIELDS)), num_workers, int(counts[counts > 1].sum()))


def _stretch_ends(quanta: list[int], num_workers: int) -> list[int]:
    """Where each worker's stretch ends. An end close to the end of a row moves there, which saves a merge."""
    total = sum(quanta)
    borders = np.cumsum(quanta) if quanta else np.zeros(1, np.int64)
    slack = 0.02 * total / num_workers
    ends = []
    for worker in range(1, num_workers + 1):
        exact = worker * total / num_workers
        border = int(borders[np.argmin(np.abs(borders - exact))])
        ends.append(border if abs(border - exact) <= slack else round(exact))
    return ends

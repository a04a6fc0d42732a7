"""Decode throughput while every client decodes, so that prefill and the ends of a turn do not blur it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mlxcel_paged.bench.serve.record import RequestRecord


@dataclass(frozen=True, slots=True)
class DecodeWindow:
    """What was decoded while all clients did.

    Attributes:
        tokens_per_s: the clients' rates added up.
        seconds: how long all of them decoded.
    """

    tokens_per_s: float
    seconds: float


def decode_window(records: Sequence[RequestRecord], num_clients: int) -> DecodeWindow | None:
    """Finds the times at which `num_clients` requests decode and measures them; None when there are none.

    A request decodes from its first chunk to its last. A rate is (tokens - 1) / (time of the last - time of the first),
    which is (output tokens - 1) / (end-to-end - TTFT) cut to the window; chunks count as many tokens as they hold on
    average. A window too short to hold two chunks of every client is left out.
    """
    decoding = [record for record in records if record.is_complete and len(record.chunk_times) > 1]
    num_token_seconds = seconds = 0.0
    for start, end in _all_decode(decoding, num_clients):
        rates = [rate for record in decoding if (rate := _rate(record, start, end)) is not None]
        if len(rates) == num_clients:
            num_token_seconds += sum(rates) * (end - start)
            seconds += end - start
    return DecodeWindow(num_token_seconds / seconds, seconds) if seconds else None


def _all_decode(records: Sequence[RequestRecord], num_clients: int) -> list[tuple[float, float]]:
    changes = [(record.chunk_times[0], 1) for record in records] + [(record.chunk_times[-1], -1) for record in records]
    changes.sort()  # at one moment ends come before starts
    intervals = []
    num_decoding = 0
    for (time, change), (next_time, _) in pairwise(changes):
        num_decoding += change
        if num_decoding == num_clients and next_time > time:
            intervals.append((time, next_time))
    return intervals


def _rate(record: RequestRecord, start: float, end: float) -> float | None:
    times = record.chunk_times
    first, last = bisect_left(times, start), bisect_right(times, end) - 1
    if last <= first:
        return None
    tokens_per_chunk = (record.num_output_tokens - 1) / (len(times) - 1)
    return (last - first) * tokens_per_chunk / (times[last] - times[first])

"""Reads recorded request streams: Azure's LLM inference traces and Mooncake's.

Azure (https://github.com/Azure/AzurePublicDataset): CSV with TIMESTAMP, ContextTokens, GeneratedTokens. Mooncake
(https://github.com/kvcache-ai/Mooncake): a JSON object a line with timestamp in milliseconds, input_length,
output_length and hash_ids, one for each block of 512 prompt tokens; requests that begin alike share them.
"""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlxcel_paged.errors import PagedError

TraceFormat = Literal["azure", "mooncake"]
MOONCAKE_BLOCK_TOKENS = 512

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(PagedError, ValueError):
    """A trace cannot be read."""

    slug = "invalid_trace"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        arrival_s: seconds after the first request.
        input_len, output_len: tokens, at least one each.
        prefix_blocks: names of the blocks that the prompt begins with; equal names are equal tokens.
    """

    arrival_s: float
    input_len: int
    output_len: int
    prefix_blocks: tuple[int, ...] = ()


def read_trace(
    path: Path, *, max_requests: int | None = None, time_scale: float = 1.0, length_scale: float = 1.0
) -> tuple[list[TraceRequest], int]:
    """Reads the first requests of a trace; the suffix of the file tells the format (.csv Azure, .jsonl Mooncake).

    Args:
        path: the file.
        max_requests: how many to read; None reads all.
        time_scale: factor of all times; 2 halves the load.
        length_scale: factor of all lengths, which stay at least 1.

    Returns:
        The requests in order of arrival, and the tokens of one prefix block after scaling.

    Raises:
        TraceError: the file cannot be read, is of neither format, is empty, or a line is wrong; the message has the
            line's number.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = _azure_rows(file) if path.suffix == ".csv" else _mooncake_rows(file)
            requests = []
            for request in rows:
                requests.append(request)
                if len(requests) == max_requests:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error
    except _LineError as error:
        raise TraceError(
            f"{path}, line {error.number}: {error} (hint: .csv is Azure's format, .jsonl Mooncake's)"
        ) from None
    if not requests:
        raise TraceError(f"the trace {path} has no requests")
    requests.sort(key=lambda request: request.arrival_s)
    start_s = requests[0].arrival_s
    scaled = [
        TraceRequest(
            (request.arrival_s - start_s) * time_scale,
            max(1, round(request.input_len * length_scale)),
            max(1, round(request.output_len * length_scale)),
            request.prefix_blocks,
        )
        for request in requests
    ]
    return scaled, max(1, round(MOONCAKE_BLOCK_TOKENS * length_scale))


class _LineError(Exception):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


def _azure_rows(file: Any) -> Iterator[TraceRequest]:
    reader = csv.DictReader(file)
    if reader.fieldnames is None or not set(_AZURE_COLUMNS) <= set(reader.fieldnames):
        raise _LineError(1, f"the columns are not {', '.join(_AZURE_COLUMNS)}: {reader.fieldnames}")
    for row in reader:
        try:
            # Seven fractional digits, of which Python takes six.
            time = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=datetime.UTC)
            yield _request(time.timestamp(), row["ContextTokens"], row["GeneratedTokens"])
        except (TypeError, ValueError) as error:
            raise _LineError(reader.line_num, str(error)) from None


def _mooncake_rows(file: Any) -> Iterator[TraceRequest]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            blocks = tuple(int(block) for block in row.get("hash_ids", ()))
            yield _request(float(row["timestamp"]) / 1e3, row["input_length"], row["output_length"], blocks)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            text = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise _LineError(number, text) from None


def _request(arrival_s: float, input_len: Any, output_len: Any, blocks: tuple[int, ...] = ()) -> TraceRequest:
    if int(input_len) < 0 or int(output_len) < 0 or any(block < 0 for block in blocks):
        raise ValueError(f"a length or a block is negative: {input_len}, {output_len}")
    # Both formats know requests without output; a server has none.
    return TraceRequest(arrival_s, max(1, int(input_len)), max(1, int(output_len)), blocks)

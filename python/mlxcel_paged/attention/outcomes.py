"""Counts what every attention launch did."""

from __future__ import annotations

from collections import Counter

WRITE_ONLY = "write_only"
CHUNK_SDPA = "chunk_sdpa"


class Outcomes:
    """Launch counts by outcome, decode and prefill apart. One writer; snapshots may be taken from any thread.

    Outcomes are `fused`, `gather:<cause>`, and for prefill also `write_only`: the last layer of a prompt chunk, whose
    attention nobody reads; and `chunk_sdpa`: MLX's attention over the chunk and what it sees of its prefix (CUDA, all
    arms).
    """

    def __init__(self) -> None:
        self._decode: Counter[str] = Counter()
        self._prefill: Counter[str] = Counter()

    def count_decode(self, outcome: str) -> None:
        self._decode[outcome] += 1

    def count_prefill(self, outcome: str) -> None:
        self._prefill[outcome] += 1

    def snapshot(self) -> dict[str, int]:
        """Decode launches so far, one per layer and step."""
        return dict(self._decode)

    def snapshot_prefill(self) -> dict[str, int]:
        """Prefill launches so far, one per layer and chunk."""
        return dict(self._prefill)

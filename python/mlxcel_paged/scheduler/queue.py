"""The waiting sequences, oldest first."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from mlxcel_paged.scheduler.sequence import Sequence


def _arrival(sequence: Sequence) -> int:
    return sequence.sequence_id


class WaitingQueue:
    """Sequences in order of arrival.

    A preempted sequence comes back to its place by arrival, which is ahead of everything that was never admitted:
    newcomers cannot overtake it.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.num_tokens = 0  # of all that wait

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def head(self) -> Sequence | None:
        return next(iter(self._sequences), None)  # one look, so another thread may ask

    def push(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=_arrival)
        self.num_tokens += sequence.num_tokens

    def pop(self) -> Sequence:
        sequence = self._sequences.pop(0)
        self.num_tokens -= sequence.num_tokens
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self.num_tokens -= sequence.num_tokens

"""Which sequence gives way when pages run short."""

from __future__ import annotations

from collections.abc import Iterable

from mlxcel_paged.scheduler.sequence import Sequence


def choose_victim(holders: Iterable[Sequence]) -> Sequence:
    """Picks the sequence with the fewest generated tokens, the newest of those.

    Generated tokens survive preemption, so a sequence that gave way is ahead of every newcomer when it resumes, and the
    one furthest ahead is never asked: it finishes and gives its pages back.
    """
    return min(holders, key=lambda sequence: (sequence.num_generated_tokens, -sequence.sequence_id))

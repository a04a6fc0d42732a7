"""A small deterministic pairwise cover: every pair of values of any two factors occurs in some case."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise_cover(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Greedy cover: each case takes an uncovered pair and fills the other factors with what covers most."""
    names = list(factors)
    missing = {
        (first, a, second, b)
        for first, second in itertools.combinations(range(len(names)), 2)
        for a in range(len(factors[names[first]]))
        for b in range(len(factors[names[second]]))
    }
    cases = []
    while missing:
        first, a, second, b = min(missing)
        chosen = {first: a, second: b}
        for place in range(len(names)):
            if place in chosen:
                continue
            values = range(len(factors[names[place]]))
            chosen[place] = max(values, key=lambda value: (_gain(missing, chosen, place, value), -value))
        covered = {(one, chosen[one], two, chosen[two]) for one, two in itertools.combinations(range(len(names)), 2)}
        missing -= covered
        cases.append({name: factors[name][chosen[place]] for place, name in enumerate(names)})
    return cases


def _gain(missing: set[tuple[int, int, int, int]], chosen: dict[int, int], place: int, value: int) -> int:
    return sum(
        ((other, chosen[other], place, value) if other < place else (place, value, other, chosen[other])) in missing
        for other in chosen
    )

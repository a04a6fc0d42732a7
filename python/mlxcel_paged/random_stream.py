"""Random numbers by counting: each is a hash of a seed and an index, so streams need no state and no order.

SplitMix64 (Steele, Lea and Flood 2014) as a counter-based generator; the seed is mixed first, so that the streams of
neighbouring seeds do not overlap.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
# Sets the seeds of choices apart from the numbers of a stream.
_CHOICE = 0xD1B54A32D192ED03


def uniform(seed: int, index: int) -> float:
    """Returns output `index` of the random stream `seed`: a multiple of 2^-23 in [0, 1), exact in f32."""
    state = (_mix(seed & _MASK) + (index + 1) * _GAMMA) & _MASK
    return (_mix(state) >> 41) / 2**23


def choice_seed(seed: int, choice: int) -> int:
    """Returns the seed of one of several answers to a prompt; the first has the seed itself, as if it were alone."""
    return seed if choice == 0 else _mix((_mix(seed & _MASK) ^ choice * _CHOICE) & _MASK)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)

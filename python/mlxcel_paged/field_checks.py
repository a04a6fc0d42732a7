"""Checks that configurations share. A value of another type is refused, whatever it would compare equal to."""

from __future__ import annotations

import math
from typing import TypeGuard

from mlxcel_paged.errors import InvalidFieldError


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an integer; a switch is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is an integer or a float; a switch is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuses what is none of `choices`."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise InvalidFieldError(name, value, f"one of {', '.join(map(str, choices))}")


def check_switch(name: str, value: object) -> None:
    """Refuses what is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidFieldError(name, value, "True or False")


def check_range(name: str, value: object, low: int, high: int, beside: tuple[str, object] | None = None) -> None:
    """Refuses what is no integer from `low` to `high`; a switch is none.

    Args:
        beside: another field that the range depends on, and its value; a switch is True.
    """
    if not is_whole(value) or not low <= value <= high:
        raise InvalidFieldError(name, value, f"between {low} and {high}", beside=beside)


def check_count(name: str, value: object, expected: str = "positive") -> None:
    """Refuses what is no integer of 1 or more; a switch is none."""
    if not is_whole(value) or value < 1:
        raise InvalidFieldError(name, value, expected)


def check_seconds(name: str, value: object) -> None:
    """Refuses what is no positive and finite number."""
    if not is_number(value) or not 0 < value < math.inf:
        raise InvalidFieldError(name, value, "positive")


def check_texts(name: str, value: object) -> None:
    """Refuses what is no tuple or list of texts: one text would be read letter by letter."""
    if not isinstance(value, tuple | list) or not all(isinstance(text, str) for text in value):
        raise InvalidFieldError(name, value, "a tuple of texts", got="")

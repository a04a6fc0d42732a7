"""Typed reading of the members of one JSON object. null means absent; a bool is no number; leftovers are refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from mlxcel_paged.field_checks import is_number, is_whole
from mlxcel_paged.server.body import json_type
from mlxcel_paged.server.errors import ApiError, bad_request
from mlxcel_paged.text.errors import TextError
from mlxcel_paged.text.prompt import require_unicode


class Fields:
    """The members of an object, taken out one by one.

    Args:
        members: the parsed object; not changed.
        path: where the object is in the request, as prefix of the names in errors; empty for the request itself.
    """

    def __init__(self, members: Mapping[str, Any], path: str = "") -> None:
        self._left = {name: value for name, value in members.items() if value is not None}
        self._path = path

    def param(self, name: str) -> str:
        """The name of a member as errors show it."""
        return f"{self._path}.{name}" if self._path else name

    @property
    def names(self) -> list[str]:
        """The members that have not been taken."""
        return list(self._left)

    def take(self, name: str) -> Any:
        """The member as parsed, or None."""
        return self._left.pop(name, None)

    def required(self, name: str) -> Any:
        """The member as parsed.

        Raises:
            ApiError: 400, it is absent.
        """
        value = self.take(name)
        if value is None:
            param = self.param(name)
            raise bad_request(param, f"{param} is required", "missing_required_parameter")
        return value

    def boolean(self, name: str) -> bool | None:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise wrong_type(self.param(name), "a boolean", value)
        return value

    def integer(self, name: str, *, minimum: int, maximum: int | None = None) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if not is_whole(value):
            raise wrong_type(self.param(name), "an integer", value)
        if value < minimum or (maximum is not None and value > maximum):
            expected = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
            raise bad_request(self.param(name), f"{self.param(name)} must be {expected}, got {_shown(value)}")
        return value

    def number(self, name: str, *, minimum: float, maximum: float) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if not is_number(value):
            raise wrong_type(self.param(name), "a number", value)
        # Compared before it is converted: an integer may be too large for a float. 1e999 is parsed as infinity.
        if not minimum <= value <= maximum:
            message = f"{self.param(name)} must be between {minimum:g} and {maximum:g}, got {_shown(value)}"
            raise bad_request(self.param(name), message)
        return float(value)

    def string(self, name: str) -> str | None:
        value = self.take(name)
        if value is None:
            return None
        return checked_string(self.param(name), value)

    def nested(self, name: str) -> Fields | None:
        """The members of an object inside this one."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise wrong_type(self.param(name), "an object", value)
        return Fields(value, self.param(name))

    def mapping(self, name: str) -> dict[str, Any] | None:
        """A JSON object that is passed on as it is: Unicode text and finite numbers only.

        Raises:
            ApiError: 400, it is no such object.
        """
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise wrong_type(self.param(name), "an object", value)
        try:
            checked_string(self.param(name), json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (ValueError, RecursionError):
            raise bad_request(self.param(name), f"{self.param(name)} holds an infinite number or is too deep") from None
        return value

    def ignore(self, names: Collection[str]) -> None:
        """Drops members that do not change the output."""
        for name in names:
            self._left.pop(name, None)

    def only_neutral(self, neutral: Mapping[str, Collection[Any]]) -> None:
        """Accepts members that are not supported as long as their value asks for nothing.

        Raises:
            ApiError: 400, a member has another value.
        """
        for name, values in neutral.items():
            value = self.take(name)
            # 1 == True in Python, not in JSON.
            if value is None or any(
                value == other and isinstance(value, bool) == isinstance(other, bool) for other in values
            ):
                continue
            param = self.param(name)
            message = f"{param} is not supported" + (f" with {_shown(value)}" if values else "")
            raise bad_request(param, message, "unsupported_value" if values else "unsupported_parameter")

    def finish(self) -> None:
        """Refuses what has not been taken.

        Raises:
            ApiError: 400, names one unknown member.
        """
        for name in self._left:
            param = self.param(name)
            raise bad_request(param, f"unknown field: {_shown(param)}", "unknown_parameter")


def checked_string(param: str, value: object) -> str:
    """A string that is Unicode text.

    Raises:
        ApiError: 400, it is of another type or holds a lone surrogate.
    """
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)
    try:
        require_unicode(value)
    except TextError as error:
        raise bad_request(param, f"{param}: {error}", "invalid_unicode") from None
    return value


def wrong_type(param: str, expected: str, value: object) -> ApiError:
    """A 400 for a value of another JSON type."""
    return bad_request(param, f"{param} must be {expected}, got {json_type(value)}", "invalid_type")


def _shown(value: object) -> str:
    """A value as a message quotes it: short, whatever was sent."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

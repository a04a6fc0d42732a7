"""Byte counts as people write them: plain bytes or with a binary unit."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parses `4096`, `512MiB` or `1.5 GiB` into a number of bytes.

    Raises:
        ValueError: The text is not a non-negative number with an optional unit out of KiB, MiB, GiB, TiB.
    """
    match = _PATTERN.fullmatch(text.strip())
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNITS:
        raise ValueError(f"not a number of bytes: {text!r} (hint: plain bytes, or a number with KiB, MiB, GiB or TiB)")
    number, scale = match.group(1), _UNITS[unit]
    num_bytes = int(number) * scale if number.isdigit() else int(float(number) * scale)
    if num_bytes > 1 << 62:
        raise ValueError(f"more bytes than any machine holds: {text!r}")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Writes a number of bytes with the largest unit that keeps it at 1 or more: `1.5 GiB`, `512 B`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"

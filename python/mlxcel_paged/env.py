"""Every environment variable the package reads, typed, in one place.

Values are read when asked for, so a test or a long-lived process may change them; what was not understood is
reported once per value.
"""

from __future__ import annotations

import enum
import logging
import os
from pathlib import Path

logger = logging.getLogger("mlxcel_paged")

NATIVE_ATTENTION = "MLXCEL_PAGED_ATTENTION_NATIVE"
CACHE_DIR = "MLXCEL_PAGED_CACHE_DIR"
STEP_FUSION = "MLXCEL_PAGED_STEP_FUSION"
API_KEY = "MLXCEL_PAGED_API_KEY"

_OFF = frozenset({"0", "false", "off", "no"})
_FORCE = frozenset({"1", "true", "on", "yes"})
_reported: set[tuple[str, str]] = set()


class NativeAttention(enum.Enum):
    """What `MLXCEL_PAGED_ATTENTION_NATIVE` asks of the dispatch."""

    OFF = "off"  # the kill switch: gather end to end
    FORCE = "force"  # fused for every shape that the kernel can serve
    POLICY = "policy"  # fused wherever the validated matrix serves the shape


def native_attention() -> NativeAttention:
    """Reads `MLXCEL_PAGED_ATTENTION_NATIVE`; unset, empty or not understood means `POLICY`."""
    raw = os.environ.get(NATIVE_ATTENTION)
    value = (raw or "").strip().lower()
    if value in _OFF:
        return NativeAttention.OFF
    if value in _FORCE:
        return NativeAttention.FORCE
    if value:
        _report_once(NATIVE_ATTENTION, raw or "", "the default policy applies; use 0 (gather) or 1 (force fused)")
    return NativeAttention.POLICY


def step_fusion() -> bool:
    """Reads `MLXCEL_PAGED_STEP_FUSION`: whether a decode step on an NVIDIA GPU uses our kernels outside attention too;
    on unless switched off."""
    raw = os.environ.get(STEP_FUSION)
    value = (raw or "").strip().lower()
    if value and value not in _OFF | _FORCE:
        _report_once(STEP_FUSION, raw or "", "it is on; use 0 or 1")
    return value not in _OFF


def cache_dir() -> Path:
    """Reads `MLXCEL_PAGED_CACHE_DIR`, where compiled kernels are kept; by default a folder of the user's cache."""
    chosen = os.environ.get(CACHE_DIR)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlxcel-paged"


def api_key() -> str | None:
    """Reads `MLXCEL_PAGED_API_KEY`: the key that clients of the server must send; unset means none.

    Raises:
        ValueError: it is empty, which would leave a server open that was meant to be closed.
    """
    key = os.environ.get(API_KEY)
    if key is not None and not key.strip():
        raise ValueError(f"{API_KEY} is set but empty (hint: unset it to serve without a key)")
    return None if key is None else key.strip()


def _report_once(name: str, value: str, consequence: str) -> None:
    if (name, value) not in _reported:
        _reported.add((name, value))
        logger.warning("%s=%r is not understood: %s", name, value, consequence)

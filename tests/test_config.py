"""Settings are refused before anything is loaded, and the message names the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_paged.byte_size import format_bytes, parse_bytes
from mlxcel_paged.config import EngineConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("device", "tpu"),
        ("decode_storage", "sparse"),
        ("arm", "dense"),
        ("dtype", "int8"),
        ("page_size", 0),
        ("page_size", 24),
        ("parallel", 0),
        ("parallel", 1 << 20),
        ("prefill_chunk", 0),
        ("max_context", 1),
        ("kv_cache_budget", -1),
    ],
)
def test_bad_field_is_named(field: str, value: object) -> None:
    settings: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=field):
        EngineConfig(**settings)


def test_contradicting_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="no_batch"):
        EngineConfig(no_batch=True, decode_storage="paged")
    with pytest.raises(ValueError, match="arm"):
        EngineConfig(arm="fused", decode_storage="dense")


def test_no_batch_is_a_batch_of_one() -> None:
    assert EngineConfig(parallel=8, no_batch=True).max_batch == 1


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("4096", 4096), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("2mib", 2 << 20), (" 7 b ", 7)],
)
def test_parse_bytes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "-1", "1GB", "auto", "1e9", "0x10", "GiB", "1 2", "9" * 40])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"bytes"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=1 << 61))
def test_plain_bytes_are_exact(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == num_bytes
    assert format_bytes(num_bytes)

"""A setting of the wrong type is taken for another value, or reaches the user as an error that is not ours.

The fault class: a range is compared before anybody asks whether the value is a number at all. `parallel=2.5` made an
engine, `no_batch="no"` switched batching off, and each letter of `api_keys="sesame"` opened the server.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine.queue_limits import QueueLimits
from mlxcel_paged.engine.step_times import StepTimes
from mlxcel_paged.engine.watchdog import Watchdog
from mlxcel_paged.errors import InvalidFieldError
from mlxcel_paged.server.config import ServerConfig

NO_SWITCH: list[Any] = ["no", 0, 1.0, []]
NO_WHOLE_NUMBER: list[Any] = [2.5, 16.0, math.nan, math.inf, True, "16", b"16", [16], {}, object()]
ENGINE_NUMBERS = (
    "parallel",
    "page_size",
    "kv_cache_budget",
    "max_context",
    "prefill_chunk",
    "max_num_batched_tokens",
)
SERVER_NUMBERS = (
    "port",
    *(field.name for field in dataclasses.fields(ServerConfig) if field.name.startswith("max_")),
    "retry_after_s",
    "shutdown_timeout_s",
)


def refused(cls: Any, field: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError, match=rf"^{field} must be ") as caught:
        cls(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("value", NO_WHOLE_NUMBER, ids=repr)
@pytest.mark.parametrize(
    ("cls", "field"),
    [
        *((EngineConfig, field) for field in ENGINE_NUMBERS),
        *((ServerConfig, field) for field in SERVER_NUMBERS),
    ],
)
def test_only_a_whole_number_is_one(cls: Any, field: str, value: Any) -> None:
    refused(cls, field, value)


@pytest.mark.parametrize("value", NO_WHOLE_NUMBER, ids=repr)
@pytest.mark.parametrize("place", [0, 1])
def test_only_a_whole_number_bounds_a_queue(place: int, value: Any) -> None:
    limits: list[Any] = [8, 8]
    limits[place] = value
    with pytest.raises(InvalidFieldError, match=r"^max_queued_"):
        QueueLimits(*limits)


@pytest.mark.parametrize("value", NO_SWITCH, ids=repr)
@pytest.mark.parametrize(
    ("cls", "field"),
    [
        *((EngineConfig, field) for field in ("no_batch", "prefix_cache", "keep_quantized")),
        *((ServerConfig, field) for field in ("open_metrics", "debug_endpoints")),
    ],
)
def test_only_true_and_false_switch(cls: Any, field: str, value: Any) -> None:
    refused(cls, field, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None, True], ids=repr)
def test_an_interval_is_a_finite_number(value: Any) -> None:
    refused(ServerConfig, "keepalive_interval_s", value)
    if value is not None:
        with pytest.raises(InvalidFieldError, match=r"^step_timeout_s must be positive"):
            Watchdog(StepTimes(), value, lambda: None)


@pytest.mark.parametrize("field", ["api_keys", "cors_origins", "model_aliases"])
@pytest.mark.parametrize("value", ["sesame", "*", "", None, 7, (7,)], ids=repr)
def test_one_text_is_not_several(field: str, value: Any) -> None:
    refused(ServerConfig, field, value)


def test_a_wrong_key_is_not_shown() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        ServerConfig(api_keys="sesame")  # type: ignore[arg-type]
    assert "sesame" not in str(caught.value)

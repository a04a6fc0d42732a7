"""Requests are checked once, where they are made, and the message names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlxcel_paged.request import InvalidRequestError, Request, SamplingParams


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "4"),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", None),
        ("top_p", 1.01),
        ("top_p", -0.01),
        ("top_k", -1),
        ("top_k", 2.0),
        ("min_p", 1.5),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", "abc"),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
    ],
)
def test_a_sampling_field_out_of_range_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=param) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("param", "value"),
    [("max_tokens", 0), ("max_tokens", 10**12), ("temperature", 0), ("top_p", 0), ("top_p", 1), ("seed", 2**64 - 1)],
)
def test_the_ends_of_each_range_are_accepted(param: str, value: Any) -> None:
    assert getattr(SamplingParams(**{param: value}), param) == value


@pytest.mark.parametrize("prompt", [[], [-1], [2**31], [1.0], [True], ["a"], "abc", None, [[1]]])
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        Request("a", prompt)


def test_a_prompt_is_copied() -> None:
    prompt = [1, 2, 3]
    request = Request("a", prompt)
    prompt.append(4)
    assert request.prompt_token_ids == [1, 2, 3]


def test_a_request_needs_a_name() -> None:
    with pytest.raises(InvalidRequestError, match="request_id"):
        Request("", [1])

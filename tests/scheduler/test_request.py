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


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("presence_penalty", -2.01),
        ("frequency_penalty", 2.01),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
        ("logit_bias", [1, 2]),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("num_logprobs", 21),
        ("num_logprobs", -1),
        ("num_logprobs", True),
    ],
)
def test_penalties_bias_and_logprobs_out_of_range_name_their_field(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param


def test_a_bias_is_kept_sorted_however_it_is_given() -> None:
    expected = ((3, 0.5), (9, -100))
    assert SamplingParams(logit_bias={9: -100, 3: 0.5}).logit_bias == expected  # type: ignore[arg-type]
    assert SamplingParams(logit_bias=((9, -100), (3, 0.5))).logit_bias == expected


@pytest.mark.parametrize(
    ("sampling", "edits_logits", "needs_history"),
    [
        (SamplingParams(), False, False),
        (SamplingParams(num_logprobs=3, seed=1), False, False),
        (SamplingParams(logit_bias={1: 1.0}), True, False),  # type: ignore[arg-type]
        (SamplingParams(presence_penalty=-1), True, True),
        (SamplingParams(frequency_penalty=1), True, True),
        (SamplingParams(repetition_penalty=1.1), True, True),
    ],
)
def test_what_edits_logits_and_what_needs_the_tokens_so_far(
    sampling: SamplingParams, edits_logits: bool, needs_history: bool
) -> None:
    assert (sampling.edits_logits, sampling.needs_history) == (edits_logits, needs_history)

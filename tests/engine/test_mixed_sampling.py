"""Whole engines over tiny models: penalties, bias, grammar and log-probabilities per row, on every arm, one step ahead,
through preemption, and with a grammar that fails."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine
from mlxcel_paged.engine.logit_edits import LogitEdits
from mlxcel_paged.engine.offline import stream
from mlxcel_paged.grammar import GrammarError
from mlxcel_paged.request import FinishReason, Request, SamplingParams, TokenEvent

from .conftest import check_drained
from .test_tiny_model import ARMS, engine_of, one_step_ahead, prompt_of
from .tiny_models import VOCAB_SIZE

__all__ = ["engine_of"]


class RisingTokens:
    """A grammar: each token is less than 40 above the one before, modulo the vocabulary. It may break at a length."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.breaks_at = breaks_at
        self.token_ids: list[int] = []

    def new_matcher(self) -> RisingTokens:
        return RisingTokens(self.breaks_at)

    def consume(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self.token_ids and not 0 < (token_id - self.token_ids[-1]) % VOCAB_SIZE < 40:
                raise GrammarError(f"{token_id} after {self.token_ids[-1]}")
            self.token_ids.append(token_id)

    def allowed(self) -> Any:
        if self.breaks_at == len(self.token_ids):
            raise GrammarError("too complex")
        bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, dtype=np.uint8)
        last = self.token_ids[-1] if self.token_ids else 5
        bits[[(last + step) % VOCAB_SIZE for step in range(1, 40)]] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)


def kinds(max_tokens: int) -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
    return [
        SamplingParams(**common, temperature=0.0, num_logprobs=3),
        SamplingParams(**common, temperature=0.9, seed=1, repetition_penalty=1.5, presence_penalty=0.5),
        SamplingParams(
            **common, temperature=0.0, frequency_penalty=2.0, logit_bias={7: 3.0, 9: -100.0}, num_logprobs=0
        ),  # type: ignore[arg-type]
        SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=2, grammar=RisingTokens(), num_logprobs=2),
        SamplingParams(**common, temperature=0.8, seed=3, top_p=0.9, logit_bias={11: 2.0}),  # type: ignore[arg-type]
        SamplingParams(**common, temperature=1.1, seed=4),
    ]


def run(engine: Engine, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[list[TokenEvent]]:
    """The events of each request, all of them running together."""
    requests = [
        Request(f"r{index}", prompt, each) for index, (prompt, each) in enumerate(zip(prompts, sampling, strict=True))
    ]
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    for event in stream(engine, requests):
        events[event.request_id].append(event)
    assert edits_of(engine).num_sequences == 0
    return list(events.values())


def edits_of(engine: Engine) -> LogitEdits:
    """What the sampler keeps per sequence."""
    check_drained(engine)
    assert engine._core is not None
    return engine._core.runner._tokens._edits  # type: ignore[attr-defined, no-any-return]


def tokens_of(events: list[list[TokenEvent]]) -> list[list[int | None]]:
    return [[event.token_id for event in each] for each in events]


def assert_same(found: list[list[TokenEvent]], expected: list[list[TokenEvent]]) -> None:
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected, strict=True):
        for event, twin in zip(one, other, strict=True):
            assert event.finish_reason is twin.finish_reason
            assert (event.logprobs is None) == (twin.logprobs is None)
            if event.logprobs is not None and twin.logprobs is not None:
                assert event.logprobs.logprob == pytest.approx(twin.logprobs.logprob, abs=1e-4)
                assert [token for token, _ in event.logprobs.top] == [token for token, _ in twin.logprobs.top]


PROMPTS = [prompt_of(length, salt=3) for length in (3, 9, 24, 2, 40, 17)]


def solo(engine: Engine, sampling: list[SamplingParams]) -> list[list[TokenEvent]]:
    return [run(engine, [prompt], [each])[0] for prompt, each in zip(PROMPTS, sampling, strict=True)]


@pytest.mark.parametrize("arm", ARMS)
def test_a_batch_of_all_kinds_gives_what_each_gives_alone(engine_of: Callable[..., Engine], arm: str) -> None:
    engine = engine_of("gemma3_text", **ARMS[arm])
    sampling = kinds(24)
    expected = solo(engine, sampling)
    assert_same(run(engine, PROMPTS, sampling), expected)
    for events, each in zip(expected, sampling, strict=True):
        numbers = [None if event.logprobs is None else len(event.logprobs.top) for event in events]
        assert numbers == [each.num_logprobs] * 24
    assert 9 not in tokens_of(expected)[2]
    plain = run(engine, PROMPTS, [SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)] * len(PROMPTS))
    assert tokens_of(plain)[0] == tokens_of(expected)[0]
    assert tokens_of(plain)[2] != tokens_of(expected)[2]


@pytest.mark.parametrize("storage", ["paged", "dense"])
def test_one_step_ahead_gives_the_same(engine_of: Callable[..., Engine], storage: str) -> None:
    sampling = kinds(20)
    expected = solo(engine_of("gemma3_text", **ARMS["fused"]), sampling)
    engine = Engine(EngineConfig(page_size=8, prefill_chunk=16), build=functools.partial(one_step_ahead, storage))
    engine.start()
    engine.wait_until_ready(120)
    assert_same(run(engine, PROMPTS, sampling), expected)
    # Rows without a history stay one step ahead: penalties and grammar alone make a step wait.
    free = [0, 4, 5]
    assert_same(
        run(engine, [PROMPTS[index] for index in free], [sampling[index] for index in free]),
        [expected[index] for index in free],
    )
    assert engine.stop(timeout_s=60)


def test_preemption_changes_nothing(engine_of: Callable[..., Engine]) -> None:
    ample = engine_of("llama", **ARMS["fused"])
    assert ample.model.memory is not None
    page_bytes = ample.model.memory.pool_bytes // sum(ample.model.memory.num_pages)
    budget = ample.model.memory.workspace_bytes + 8 * page_bytes
    short = engine_of("llama", **ARMS["fused"], kv_cache_budget=budget)
    sampling = kinds(28)
    prompts = [prompt_of(3, salt) for salt in range(len(sampling))]
    expected = run(ample, prompts, sampling)
    before = short.stats().num_preemptions
    assert_same(run(short, prompts, sampling), expected)
    assert short.stats().num_preemptions > before


@pytest.mark.parametrize("ahead", [False, True])
def test_a_grammar_that_fails_ends_its_request_alone(engine_of: Callable[..., Engine], ahead: bool) -> None:
    if ahead:
        engine = Engine(EngineConfig(page_size=8, prefill_chunk=16), build=functools.partial(one_step_ahead, "paged"))
        engine.start()
        engine.wait_until_ready(120)
    else:
        engine = engine_of("gemma3_text", **ARMS["fused"])
    sampling = kinds(12)
    expected = solo(engine_of("gemma3_text", **ARMS["fused"]), sampling)
    sampling[3] = SamplingParams(max_tokens=12, temperature=1.0, seed=2, grammar=RisingTokens(breaks_at=4))
    found = run(engine, PROMPTS, sampling)
    assert [event.token_id for event in found[3]] == [*tokens_of(expected)[3][:4], None]
    assert found[3][-1].finish_reason is FinishReason.ERROR
    assert isinstance(found[3][-1].error, GrammarError)
    del found[3], expected[3]
    assert_same(found, expected)
    assert engine.stats().num_failed_steps == 0
    if ahead:
        assert engine.stop(timeout_s=60)


def test_aborted_requests_leave_nothing_with_the_sampler(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("gemma3_text", **ARMS["fused"])
    for num_events in (1, 7, 20):
        requests = [
            Request(f"r{index}", prompt, each)
            for index, (prompt, each) in enumerate(zip(PROMPTS, kinds(60), strict=True))
        ]
        events = stream(engine, requests)
        for _ in range(num_events):
            next(events)
        events.close()  # aborts what is alive
        assert edits_of(engine).num_sequences == 0

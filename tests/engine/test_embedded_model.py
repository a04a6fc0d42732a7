"""The embedded model on its default path: what several clients get is what each would get alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine
from mlxcel_paged.engine.offline import generate
from mlxcel_paged.request import SamplingParams

from .conftest import check_drained

pytestmark = pytest.mark.model

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small brown fox who lived at the edge of a forest, and every morning she went out",
    "def fibonacci(n):\n    ",
    "One, two, three, four, five, six, seven, eight, nine, ten. " * 4 + "One, two,",
)
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(EngineConfig(max_context=1024))
    engine.start()
    engine.wait_until_ready(300)
    yield engine
    check_drained(engine)
    assert engine.stop(timeout_s=60)


def encode(engine: Engine) -> list[list[int]]:
    return [list(engine.model.tokenizer.encode(prompt)) for prompt in PROMPTS]


def test_four_streams_of_different_lengths_give_what_each_gives_alone_and_on_the_gather_path(engine: Engine) -> None:
    prompts = encode(engine)
    assert engine.model.storage.storage == "paged"
    together = [completion.token_ids for completion in generate(engine, prompts, GREEDY)]
    assert together == [generate(engine, [prompt], GREEDY)[0].token_ids for prompt in prompts]
    assert set(engine.stats().decode_launches) == {"fused"}
    check_drained(engine)

    gather = Engine(EngineConfig(max_context=1024, arm="gather"))
    gather.start()
    gather.wait_until_ready(300)
    assert [completion.token_ids for completion in generate(gather, prompts, GREEDY)] == together
    assert all(outcome.startswith("gather") for outcome in gather.stats().decode_launches)
    assert gather.stop(timeout_s=60)


def test_a_seeded_request_is_the_same_in_a_crowd(engine: Engine) -> None:
    prompts = encode(engine)
    seeded = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.95, seed=1234)
    alone = generate(engine, [prompts[0]], seeded)[0].token_ids
    crowd = [SamplingParams(max_tokens=8, temperature=1.0), GREEDY, seeded, SamplingParams(max_tokens=8, top_k=20)]
    found = generate(engine, [prompts[1], prompts[2], prompts[0], prompts[3]], crowd)
    assert found[2].token_ids == alone
    assert all(completion.error is None for completion in found)

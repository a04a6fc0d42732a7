"""The embedded model on a GPU through the whole engine, one step ahead: greedy tokens of the fused and the gather path,
and of one request and many. Skipped without a GPU."""

from __future__ import annotations

import mlx.core as mx
import pytest

if not mx.cuda.is_available():
    pytest.skip("needs a CUDA GPU and MLX's CUDA backend", allow_module_level=True)

from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine import Engine
from mlxcel_paged.engine.offline import generate
from mlxcel_paged.errors import ModelNotFoundError
from mlxcel_paged.models.embedded import embedded_gguf
from mlxcel_paged.request import SamplingParams

try:
    embedded_gguf()
except ModelNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

SUBJECTS = ("France", "the ocean", "a small brown fox", "prime numbers", "bread", "the moon", "a library", "winter")
PROMPTS = [f"{'Here is a story. ' * (7 * index)}Once upon a time, {subject}" for index, subject in enumerate(SUBJECTS)]


def tokens(arm: str, num_tokens: int, *, parallel: int = 8, page_size: int = 16) -> list[list[int]]:
    engine = Engine(
        EngineConfig(
            device="gpu",
            dtype="float16",
            keep_quantized=False,
            arm=arm,
            max_context=2048,
            parallel=parallel,
            page_size=page_size,
        )
    )
    engine.start()
    engine.wait_until_ready(300)
    try:
        prompts = [list(engine.model.tokenizer.encode(prompt)) for prompt in PROMPTS]
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        completions = generate(engine, prompts, sampling)
        assert all(completion.error is None for completion in completions)
        launches = set(engine.stats().decode_launches)
        assert launches == ({"fused"} if arm == "auto" else {"gather:forced"})
        assert engine.stats().kv_pages_used == 0
        return [completion.token_ids for completion in completions]
    finally:
        assert engine.stop(timeout_s=60)


def agreement(left: list[list[int]], right: list[list[int]]) -> list[int]:
    """Tokens until the two first differ, for every prompt."""
    return [
        next((place for place, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
        for pair in zip(left, right, strict=True)
    ]


@pytest.mark.parametrize("page_size", [16, 64])
def test_fused_and_gather_give_the_same_tokens(page_size: int) -> None:
    fused, gather = tokens("auto", 64, page_size=page_size), tokens("gather", 64, page_size=page_size)
    # In 16 bit two of eight stories may meet a tie that rounding decides; a fault shows in all of them at once.
    matched = agreement(fused, gather)
    assert sum(length == 64 for length in matched) >= 6, matched
    assert min(matched) >= 8, matched


def test_the_same_requests_give_the_same_tokens_again() -> None:
    assert tokens("auto", 64) == tokens("auto", 64)


def test_more_requests_than_places() -> None:
    alone, queued = tokens("auto", 32), tokens("auto", 32, parallel=3)
    matched = agreement(alone, queued)
    assert sum(length == 32 for length in matched) >= 6, matched

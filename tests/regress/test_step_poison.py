"""One request's sampling fields fail the step that it shares with others.

The fault class: a value that the request check lets pass (more than 64 biased tokens, a penalty over a long prompt, an
integer beyond any float, a penalty that overflows) raises in the batch, and everybody in it gets a 500. And its
relative: a schema that the compiler lets pass and that no answer can begin to match, which is the client's fault and
not the server's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_paged.engine.logit_edits import LogitEdits
from mlxcel_paged.engine.sampler import Sampler
from mlxcel_paged.engine.token_edits import TokenEdits
from mlxcel_paged.request import Request, SamplingParams
from mlxcel_paged.scheduler.sequence import Sequence
from mlxcel_paged.text.json_grammar import GrammarCompiler, GrammarSyntaxError
from text.byte_tokenizer import byte_tokenizer

VOCAB_SIZE = 512
both_modules = pytest.mark.parametrize("xp", [np, mx], ids=["numpy", "mlx"])


@dataclass
class Row:
    """What sampler and edits look at of a decode row."""

    sequence: Sequence
    sample_index: int = 0
    seed: int = 5

    @property
    def sampling(self) -> SamplingParams:
        return self.sequence.request.sampling


def row(place: int, prompt: list[int], **sampling: Any) -> Row:
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **sampling})
    request = Request(f"r{place}", prompt, params)
    return Row(Sequence(request, sequence_id=place, max_tokens=4, seed=1, stop_token_ids=frozenset()))


def next_tokens(xp: Any, rows: list[Row]) -> list[int]:
    logits = np.linspace(-8.0, 8.0, VOCAB_SIZE, dtype=np.float32)[None].repeat(len(rows), axis=0)
    edited, failures = LogitEdits(xp).apply(xp.array(logits), rows)  # type: ignore[arg-type]
    assert not failures
    return [int(token) for token in np.array(Sampler(xp).sample(edited, rows))]


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 128, 129, 300])
def test_any_number_of_tokens_may_be_biased(num_tokens: int) -> None:
    bias = tuple((token_id, float(token_id % 7)) for token_id in range(num_tokens))
    edits = TokenEdits(SamplingParams(max_tokens=1, logit_bias=bias), [1]).edits()
    assert dict(zip(edits.token_ids.tolist(), edits.bias.tolist(), strict=True)) == dict(bias)


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 128, 129, 300])
def test_a_prompt_of_any_length_may_be_penalised(num_tokens: int) -> None:
    edits = TokenEdits(SamplingParams(max_tokens=1, repetition_penalty=2.0), list(range(num_tokens))).edits()
    assert sorted(edits.token_ids.tolist()) == list(range(num_tokens))
    assert edits.repetition.tolist() == [2.0] * num_tokens


@both_modules
@pytest.mark.parametrize(
    "hostile",
    [
        {"top_k": 10**400, "temperature": 1.0},
        {"top_k": 10**40, "temperature": 1.0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e-300, "temperature": 1.0, "top_p": 0.5},
        {"repetition_penalty": 1e300, "temperature": 1.0},
        {"logit_bias": tuple((token_id, -100.0) for token_id in range(VOCAB_SIZE))},
    ],
)
def test_no_value_fails_the_step_of_others(xp: Any, hostile: dict[str, Any]) -> None:
    prompt = list(range(VOCAB_SIZE))
    mine, other = next_tokens(xp, [row(0, prompt, **hostile), row(1, prompt)])
    assert other == VOCAB_SIZE - 1
    assert 0 <= mine < VOCAB_SIZE


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": "integer", "minimum": 10**400},
        {"type": "integer", "maximum": 10**30},
    ],
)
def test_a_schema_that_nothing_can_match_is_refused(schema: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(GrammarSyntaxError, match="the schema cannot be used"):
        GrammarCompiler(tokenizer, len(tokenizer)).from_json_schema(schema)

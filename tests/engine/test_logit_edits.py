"""Bias, penalties and masks against their definition, in batches of every mixture, on NumPy and on MLX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from mlxcel_paged.engine.logit_edits import LogitEdits
from mlxcel_paged.grammar import GrammarError
from mlxcel_paged.request import Request, SamplingParams
from mlxcel_paged.scheduler.sequence import Sequence

VOCAB_SIZE = 75  # not a multiple of the 32 bits of a mask's word
both_modules = pytest.mark.parametrize("xp", [np, mx], ids=["numpy", "mlx"])
PROMPT, OUTPUT = [3, 3, 9, 20], [9, 5, 5, 5, 74]


class EvenTokens:
    """A grammar of even tokens; it ends after 3 and breaks on 13."""

    def new_matcher(self) -> EvenTokens:
        fresh = EvenTokens()
        fresh.token_ids = []
        return fresh

    token_ids: list[int]

    def consume(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        if 13 in self.token_ids:
            raise GrammarError("13 is not even")

    def allowed(self) -> Any:
        bits = np.zeros(96, dtype=np.uint8)
        bits[0 : VOCAB_SIZE : 2 if len(self.token_ids) < 3 else VOCAB_SIZE] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)


@dataclass
class Row:
    sampling: SamplingParams
    output: list[int] = field(default_factory=lambda: list(OUTPUT))
    number: int = 0

    def __post_init__(self) -> None:
        request = Request(f"r{self.number}", PROMPT, self.sampling)
        self.sequence = Sequence(
            request, sequence_id=self.number, max_tokens=99, seed=0, stop_token_ids=frozenset()
        )  # fmt: skip
        self.sequence.token_ids += self.output
        self.sample_index = len(self.output)
        self.seed = 0


KINDS = [
    SamplingParams(),
    SamplingParams(presence_penalty=0.5),
    SamplingParams(frequency_penalty=-1.5),
    SamplingParams(presence_penalty=-2, frequency_penalty=2),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(logit_bias={5: 2.5, 74: -100, 0: 100, 20: -0.25}),  # type: ignore[arg-type]
    SamplingParams(logit_bias={9: -3.0}, repetition_penalty=0.7, presence_penalty=1, frequency_penalty=0.25),  # type: ignore[arg-type]
    SamplingParams(grammar=EvenTokens()),
    SamplingParams(grammar=EvenTokens(), logit_bias={1: 100.0}, presence_penalty=2),  # type: ignore[arg-type]
]


def expected(logits: Any, row: Row) -> Any:
    """The definition, token by token in float64."""
    sampling = row.sampling
    bias = dict(sampling.logit_bias)
    result = logits.astype(np.float64)
    for token in range(VOCAB_SIZE):
        value = result[token] + bias.get(token, 0.0)
        if token in PROMPT + row.output:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        count = row.output.count(token)
        value -= sampling.frequency_penalty * count + (sampling.presence_penalty if count else 0.0)
        if sampling.grammar is not None and (token if len(row.output) >= 3 else token % 2):
            value = -np.inf
        result[token] = value
    return result


def logits_of(num_rows: int, seed: int = 0) -> Any:
    return (np.random.default_rng(seed).standard_normal((num_rows, VOCAB_SIZE)) * 3).astype(np.float32)


def apply(xp: Any, logits: Any, rows: list[Row], edits: LogitEdits | None = None) -> Any:
    given = xp.array(logits)
    result, failures = (edits or LogitEdits(xp)).apply(given, rows)  # type: ignore[arg-type]
    assert not failures
    assert (np.array(given) == logits).all(), "the model's logits were changed"
    return np.array(result)


@both_modules
def test_every_kind_does_what_its_definition_says(xp: Any) -> None:
    for output in ([], [9], OUTPUT):
        logits = logits_of(len(KINDS))
        rows = [Row(sampling, list(output), number) for number, sampling in enumerate(KINDS)]
        result = apply(xp, logits, rows)
        for index, row in enumerate(rows):
            np.testing.assert_allclose(result[index], expected(logits[index], row), rtol=1e-6, atol=1e-6)


@both_modules
def test_a_row_does_not_depend_on_its_neighbours(xp: Any) -> None:
    logits = logits_of(len(KINDS))
    alone = [apply(xp, logits[n : n + 1], [Row(sampling, number=n)])[0] for n, sampling in enumerate(KINDS)]
    order = np.random.default_rng(1).permutation(len(KINDS))
    for size in (2, 4, len(KINDS)):
        chosen = order[:size]
        together = apply(xp, logits[chosen], [Row(KINDS[index], number=int(index)) for index in chosen])
        for place, index in enumerate(chosen):
            assert (together[place] == alone[index]).all()


@both_modules
def test_plain_rows_are_passed_through_as_they_are(xp: Any) -> None:
    logits = xp.array(logits_of(2))
    assert LogitEdits(xp).apply(logits, [Row(SamplingParams(seed=4, num_logprobs=2))] * 2)[0] is logits  # type: ignore[list-item]


@both_modules
def test_step_by_step_equals_all_at_once_and_after_a_preemption(xp: Any) -> None:
    logits = logits_of(len(KINDS), seed=3)
    edits = LogitEdits(xp)
    rows = [Row(sampling, [], number) for number, sampling in enumerate(KINDS)]
    for num_tokens in range(len(OUTPUT) + 1):
        if num_tokens == 3:
            edits.forget(row.sequence.sequence_id for row in rows[::2])
        result = apply(xp, logits, rows, edits)
        for index, sampling in enumerate(KINDS):
            fresh = apply(xp, logits[index : index + 1], [Row(sampling, OUTPUT[:num_tokens])])[0]
            assert (result[index] == fresh).all(), (num_tokens, index)
        for row in rows:
            row.sequence.token_ids += OUTPUT[num_tokens : num_tokens + 1]
            row.sample_index += 1
    edits.forget(row.sequence.sequence_id for row in rows)
    assert edits.num_sequences == 0


@both_modules
def test_a_grammar_that_fails_fails_its_row_alone(xp: Any) -> None:
    logits = logits_of(3)
    rows = [
        Row(KINDS[1], number=0),
        Row(SamplingParams(grammar=EvenTokens()), [13], number=1),
        Row(KINDS[8], number=2),
    ]
    result, failures = LogitEdits(xp).apply(xp.array(logits), rows)  # type: ignore[arg-type]
    assert {index: str(error) for index, error in failures.items()} == {1: "13 is not even"}
    for index in (0, 2):
        np.testing.assert_allclose(np.array(result)[index], expected(logits[index], rows[index]), rtol=1e-6, atol=1e-6)


def test_a_token_that_is_not_known_yet_is_an_error_and_no_guess() -> None:
    row = Row(KINDS[1])
    row.sample_index += 1
    with pytest.raises(RuntimeError, match="6 tokens precede"):
        LogitEdits().apply(logits_of(1), [row])  # type: ignore[list-item]


@both_modules
def test_logits_beyond_the_tokenizers_vocabulary_are_masked(xp: Any) -> None:
    logits = np.zeros((1, 200), dtype=np.float32)
    result, _ = LogitEdits(xp).apply(xp.array(logits), [Row(KINDS[7], [])])  # type: ignore[list-item]
    assert np.flatnonzero(np.isfinite(np.array(result)[0])).tolist() == list(range(0, VOCAB_SIZE, 2))


@pytest.mark.parametrize("repetition", [1.3, 0.6])
def test_penalties_and_bias_are_those_of_mlx_lm(repetition: float) -> None:
    # Its windows are set to the whole sequence, which is what is meant here; its prompt tokens count for all penalties.
    logits = logits_of(1, seed=7)
    processors = sample_utils.make_logits_processors(
        logit_bias={5: 1.5, 70: -2.0},
        repetition_penalty=repetition,
        repetition_context_size=100,
        presence_penalty=0.75,
        presence_context_size=len(OUTPUT),
        frequency_penalty=0.5,
        frequency_context_size=len(OUTPUT),
    )
    reference = mx.array(logits)
    for processor in processors:
        reference = processor(mx.array(PROMPT + OUTPUT), reference)
    sampling = SamplingParams(
        logit_bias={5: 1.5, 70: -2.0},  # type: ignore[arg-type]
        repetition_penalty=repetition,
        presence_penalty=0.75,
        frequency_penalty=0.5,
    )
    np.testing.assert_allclose(apply(np, logits, [Row(sampling)]), np.array(reference), rtol=1e-6, atol=1e-6)

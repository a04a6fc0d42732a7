"""Sampling semantics against mlx-lm's own sampler, and independence of each row from everything around it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from mlxcel_paged.engine import sampler as sampler_module
from mlxcel_paged.engine.sampler import Sampler
from mlxcel_paged.random_stream import choice_seed, uniform
from mlxcel_paged.request import SamplingParams

VOCAB_SIZE = 300
both_modules = pytest.mark.parametrize("xp", [np, mx], ids=["numpy", "mlx"])


@dataclass(frozen=True)
class Row:
    sampling: SamplingParams
    seed: int = 0
    sample_index: int = 0


def logits_of(num_rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (np.random.default_rng(seed).standard_normal((num_rows, vocab_size)) * 3).astype(np.float32)


def sample(xp: Any, logits: Any, rows: list[Row]) -> list[int]:
    tokens = Sampler(xp).sample(xp.array(logits), rows)
    return [int(token) for token in tokens.tolist()]


def mlx_lm_distribution(logits: Any, sampling: SamplingParams) -> Any:
    """The distribution that `make_sampler` draws from: its filters in its order, then its temperature."""
    x = mx.array(logits)
    x = x - mx.logsumexp(x, axis=-1, keepdims=True)
    if 0 < sampling.top_p < 1.0:
        x = sample_utils.apply_top_p(x, sampling.top_p)
    if sampling.min_p != 0.0:
        x = sample_utils.apply_min_p(x, sampling.min_p, 1)
    if sampling.top_k > 0:
        x = sample_utils.apply_top_k(x, sampling.top_k)
    return np.array(mx.softmax(x / sampling.temperature, axis=-1))


@both_modules
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.8, top_p=0.8),
        SamplingParams(top_p=0.05),
        SamplingParams(top_k=1),
        SamplingParams(top_k=7, temperature=0.5),
        SamplingParams(min_p=0.1),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1.4, top_p=0.9, min_p=0.02, top_k=20),
        SamplingParams(top_p=0.99, top_k=250),
    ],
    ids=repr,
)
def test_the_distribution_is_that_of_mlx_lm(xp: Any, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    # The uniform numbers sweep [0, 1), so the share of a token is its probability, up to one grid step at each end.
    num_points = 4096
    monkeypatch.setattr(sampler_module, "uniform", lambda _seed, index: index / num_points)
    logits = logits_of(1)
    rows = [Row(sampling, sample_index=index) for index in range(num_points)]
    drawn = Counter(sample(xp, np.repeat(logits, num_points, axis=0), rows))
    expected = mlx_lm_distribution(logits, sampling)[0]
    shares = np.array([drawn[token] for token in range(VOCAB_SIZE)]) / num_points
    assert np.abs(shares - expected).max() <= 1.5 / num_points
    assert set(drawn) <= set(np.flatnonzero(expected).tolist())


@both_modules
def test_greedy_takes_the_most_likely_token(xp: Any) -> None:
    logits = logits_of(9)
    assert sample(xp, logits, [Row(SamplingParams(temperature=0))] * 9) == logits.argmax(axis=-1).tolist()


@both_modules
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=1e-40), SamplingParams(top_p=0.0)])
def test_the_limits_of_temperature_and_top_p_are_greedy(xp: Any, sampling: SamplingParams) -> None:
    logits = logits_of(20)
    rows = [Row(sampling, seed=seed) for seed in range(20)]
    assert sample(xp, logits, rows) == logits.argmax(axis=-1).tolist()


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 3000])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(top_p=0.97), SamplingParams(top_k=1500), SamplingParams()], ids=repr
)
def test_any_vocabulary_size_is_drawn_from_alike(vocab_size: int, sampling: SamplingParams) -> None:
    logits = logits_of(50, vocab_size=vocab_size) * 0.3
    rows = [Row(sampling, seed=seed) for seed in range(50)]
    tokens = sample(np, logits, rows)
    assert tokens == sample(mx, logits, rows)
    for index, token in enumerate(tokens):
        distribution = mlx_lm_distribution(
            logits[index : index + 1], sampling if sampling.top_k < vocab_size else SamplingParams()
        )[0]
        assert distribution[token] > 0.0
        number = uniform(index, 0)
        assert distribution[:token].sum() <= number + 1e-5
        assert distribution[: token + 1].sum() >= number - 1e-5


@both_modules
def test_masked_tokens_are_never_drawn(xp: Any) -> None:
    logits = logits_of(400)
    logits[:, ::2] = -np.inf
    rows = [Row(SamplingParams(temperature=5.0, top_k=200), seed=seed) for seed in range(400)]
    assert all(token % 2 == 1 for token in sample(xp, logits, rows))


@both_modules
def test_a_row_does_not_depend_on_its_neighbours_or_its_place(xp: Any) -> None:
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=10, min_p=0.05, temperature=0.7),
    ]
    # Flat rows keep more tokens than the sampler sorts at first, peaked rows do not.
    logits = logits_of(12, vocab_size=5003) * np.array([[0.1], [1.0], [2.0]] * 4, dtype=np.float32)
    rows = [Row(kinds[index % 4], seed=index, sample_index=index * 3) for index in range(12)]
    alone = [sample(xp, logits[index : index + 1], [rows[index]])[0] for index in range(12)]
    order = np.random.default_rng(1).permutation(12)
    for size in (2, 5, 12):
        chosen = order[:size]
        assert sample(xp, logits[chosen], [rows[index] for index in chosen]) == [alone[index] for index in chosen]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_raise_instead_of_choosing_anything(value: float) -> None:
    logits = logits_of(3)
    logits[1] = value
    with pytest.raises(FloatingPointError, match=f"row 1 is {value}"):
        sample(np, logits, [Row(SamplingParams(temperature=0.0))] * 3)


def test_both_array_modules_draw_the_same_tokens() -> None:
    logits = logits_of(64)
    rows = [Row(SamplingParams(temperature=1.2, top_p=0.95, top_k=100), seed=seed) for seed in range(64)]
    assert sample(np, logits, rows) == sample(mx, logits, rows)


def test_uniform_numbers_are_even_distinct_and_exact_in_f32() -> None:
    numbers = np.array([uniform(seed, index) for seed in range(40) for index in range(250)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert (numbers.astype(np.float32) == numbers).all()
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    # Chi-square with 19 degrees of freedom is above 43.8 once in a thousand; the streams are fixed.
    assert ((counts - 500) ** 2 / 500).sum() < 43.8
    # Streams of neighbouring seeds, and of seeds one increment of the generator apart, share nothing.
    gamma = 0x9E3779B97F4A7C15
    streams = [{uniform(seed, index) for index in range(200)} for seed in (0, 1, gamma, 2**64 - 1, -1 + 2**65)]
    assert len(set.union(*streams[:4])) >= 4 * 200 - 2
    assert streams[3] == streams[4]


def test_choices_have_streams_of_their_own_and_the_first_is_the_seeds() -> None:
    seeds = [choice_seed(seed, choice) for seed in (0, 1, 7, 2**64 - 1, -1) for choice in range(128)]
    assert [choice_seed(seed, 0) for seed in (0, 7, -1)] == [0, 7, -1]
    assert len({seed & (2**64 - 1) for seed in seeds}) == 4 * 128  # -1 and 2^64 - 1 are the same seed
    streams = [{uniform(choice_seed(7, choice), index) for index in range(100)} for choice in range(8)]
    assert len(set.union(*streams)) >= 8 * 100 - 2

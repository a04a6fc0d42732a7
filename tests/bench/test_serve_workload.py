"""Synthetic prompts, arrivals and traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mlxcel_paged.bench.serve.trace import TraceError, read_trace
from mlxcel_paged.bench.serve.workload import SyntheticWorkload, TraceWorkload, poisson_arrivals

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.4799600,110,27
2023-11-16 18:17:04.4799600,34,0
"""
MOONCAKE = [
    {"timestamp": 27482, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 2353]},
    {"timestamp": 30535, "input_length": 1030, "output_length": 26, "hash_ids": [46, 47, 9]},
]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def mooncake(folder: Path) -> Path:
    return write(folder / "trace.jsonl", "\n".join(map(json.dumps, MOONCAKE)))


def synthetic(**fields: object) -> SyntheticWorkload:
    defaults = {
        "clients": 2,
        "context": 33,
        "output_len": 5,
        "num_requests": 6,
        "request_rate": float("inf"),
        "seed": 0,
    }
    return SyntheticWorkload(**{**defaults, **fields})


def test_synthetic_prompts_have_the_exact_length_and_known_ids() -> None:
    requests = synthetic().requests(1, 1000)
    assert [len(request.prompt_token_ids) for request in requests] == [33] * 6
    assert {request.output_len for request in requests} == {5}
    assert all(250 <= token < 750 for request in requests for token in request.prompt_token_ids)
    assert {request.arrival_s for request in requests} == {0.0}


def test_arms_get_equal_prompts_and_turns_do_not() -> None:
    workload = synthetic()
    assert workload.requests(1, 1000) == workload.requests(1, 1000)
    prompts = {tuple(request.prompt_token_ids) for turn in (0, 1, 2) for request in workload.requests(turn, 1000)}
    prompts |= {tuple(request.prompt_token_ids) for request in synthetic(seed=1).requests(1, 1000)}
    assert len(prompts) == 24


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 49152])
def test_ids_are_in_any_vocabulary(vocab_size: int) -> None:
    (request,) = synthetic(num_requests=1).requests(1, vocab_size)
    assert 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < vocab_size


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = np.array(poisson_arrivals(20001, 4.0, np.random.default_rng(0)))
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)  # of exponential gaps alone the two are equal


def test_azure_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    requests, _ = read_trace(write(tmp_path / "a.csv", AZURE))
    assert [(request.input_len, request.output_len) for request in requests] == [(4808, 10), (34, 1), (110, 27)]
    assert [request.arrival_s for request in requests] == pytest.approx([0.0, 0.5, 1.5])


def test_mooncake_trace_is_read(tmp_path: Path) -> None:
    requests, block_tokens = read_trace(mooncake(tmp_path))
    assert block_tokens == 512
    assert [request.arrival_s for request in requests] == pytest.approx([0.0, 3.053])
    assert requests[0].prefix_blocks == (46, 47, 2353)
    assert (requests[1].input_len, requests[1].output_len) == (1030, 26)


def test_trace_is_cut_and_scaled(tmp_path: Path) -> None:
    requests, block_tokens = read_trace(mooncake(tmp_path), time_scale=2, length_scale=0.01)
    assert [request.arrival_s for request in requests] == pytest.approx([0.0, 6.106])
    assert [(request.input_len, request.output_len) for request in requests] == [(13, 1), (10, 1)]
    assert block_tokens == 5
    assert len(read_trace(mooncake(tmp_path), max_requests=1)[0]) == 1


def test_prompts_of_a_trace_share_the_blocks_that_it_says(tmp_path: Path) -> None:
    requests, block_tokens = read_trace(mooncake(tmp_path))
    workload = TraceWorkload("t", requests, block_tokens, None, None, 0)
    left, right = (request.prompt_token_ids for request in workload.requests(1, 1000))
    assert (len(left), len(right)) == (1300, 1030)
    assert left[:1024] == right[:1024]
    assert left[1024:1030] != right[1024:1030]
    assert workload.requests(2, 1000)[0].prompt_token_ids[:512] != left[:512]
    assert workload.max_tokens == 1352


def test_rate_replaces_the_arrivals_of_a_trace(tmp_path: Path) -> None:
    requests, block_tokens = read_trace(mooncake(tmp_path))
    at_once = TraceWorkload("t", requests, block_tokens, 2, float("inf"), 0).requests(1, 1000)
    assert [request.arrival_s for request in at_once] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", "", "line 1"),
        ("t.csv", "a,b\n1,2\n", "line 1"),
        ("t.csv", AZURE + "yesterday,1,2\n", "line 5"),
        ("t.csv", AZURE + "2023-11-16 18:17:05,many,2\n", "line 5"),
        ("t.csv", AZURE + "2023-11-16 18:17:05,3\n", "line 5"),
        ("t.csv", AZURE + "2023-11-16 18:17:05,-3,1\n", "negative"),
        ("t.csv", AZURE.splitlines()[0], "no requests"),
        ("t.jsonl", '{"timestamp": 1}\n', "no 'input_length'"),
        ("t.jsonl", "\n[1]\n", "line 2"),
        ("t.jsonl", "{\n", "line 1"),
        ("t.jsonl", '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "negative"),
        ("t.jsonl", b"\xff".decode("latin-1"), "line 1"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said(name: str, text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=said):
        read_trace(write(tmp_path / name, text))


def test_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path / "none.csv")

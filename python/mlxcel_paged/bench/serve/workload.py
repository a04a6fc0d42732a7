"""The requests of a benchmark: synthetic ones of exact lengths, or those of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mlxcel_paged.bench.serve.record import BenchRequest
from mlxcel_paged.bench.serve.trace import TraceRequest


class Workload(Protocol):
    """What every arm is given in a turn; each turn has prompts of its own, so that no cache knows them."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def clients(self) -> int | None:
        """Requests in flight at most; None is no bound."""

    @property
    def num_requests(self) -> int:
        """Requests of a turn."""

    @property
    def max_tokens(self) -> int:
        """Prompt and output tokens of the longest request."""

    def requests(self, turn: int, vocab_size: int) -> list[BenchRequest]:
        """The requests of a turn, the same for every arm, in order of arrival."""


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """Prompts of random tokens.

    Attributes:
        clients: requests in flight at most.
        context: tokens of each prompt.
        output_len: tokens to generate for each.
        num_requests: requests of a turn.
        request_rate: mean arrivals a second, a Poisson process; infinity sends as soon as a client is free.
        seed: of prompts and arrivals.
    """

    clients: int
    context: int
    output_len: int
    num_requests: int
    request_rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.clients} x {self.context}+{self.output_len}"

    @property
    def max_tokens(self) -> int:
        return self.context + self.output_len

    def requests(self, turn: int, vocab_size: int) -> list[BenchRequest]:
        key = (self.seed, self.clients, self.context, self.output_len, turn)
        arrivals = poisson_arrivals(self.num_requests, self.request_rate, np.random.default_rng(key))
        return [
            BenchRequest(random_tokens((*key, index), self.context, vocab_size), self.output_len, arrival_s)
            for index, arrival_s in enumerate(arrivals)
        ]


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Lengths, arrivals and, where the trace has them, shared prefixes of recorded requests.

    Attributes:
        name: for people.
        trace: the recorded requests, their lengths and times scaled as wanted.
        block_tokens: tokens that one prefix block of the trace stands for.
        clients: requests in flight at most; None replays the arrivals whatever is in flight.
        request_rate: replaces the recorded arrivals by a Poisson process; None keeps them.
        seed: of prompts and arrivals.
    """

    name: str
    trace: Sequence[TraceRequest]
    block_tokens: int
    clients: int | None
    request_rate: float | None
    seed: int

    @property
    def num_requests(self) -> int:
        return len(self.trace)

    @property
    def max_tokens(self) -> int:
        return max(request.input_len + request.output_len for request in self.trace)

    def requests(self, turn: int, vocab_size: int) -> list[BenchRequest]:
        arrivals = [request.arrival_s for request in self.trace]
        if self.request_rate is not None:
            rng = np.random.default_rng((self.seed, turn))
            arrivals = poisson_arrivals(len(self.trace), self.request_rate, rng)
        return [
            BenchRequest(self._prompt(request, index, turn, vocab_size), request.output_len, arrival_s)
            for index, (request, arrival_s) in enumerate(zip(self.trace, arrivals, strict=True))
        ]

    def _prompt(self, request: TraceRequest, index: int, turn: int, vocab_size: int) -> list[int]:
        tokens: list[int] = []
        for block in request.prefix_blocks:
            tokens += random_tokens((self.seed, turn, 0, block), self.block_tokens, vocab_size)
        num_own = max(0, request.input_len - len(tokens))
        return tokens[: request.input_len] + random_tokens((self.seed, turn, 1, index), num_own, vocab_size)


def poisson_arrivals(num_requests: int, request_rate: float, rng: np.random.Generator) -> list[float]:
    """Seconds at which requests arrive, the first at 0, with exponential gaps; all 0 for an infinite rate."""
    if request_rate == float("inf"):
        return [0.0] * num_requests
    gaps = rng.exponential(1 / request_rate, num_requests - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def random_tokens(key: tuple[int, ...], num_tokens: int, vocab_size: int) -> list[int]:
    """Token ids drawn from the middle half of the vocabulary: special tokens are at its ends."""
    low = vocab_size // 4
    high = max(low + 1, vocab_size * 3 // 4)
    tokens: list[int] = np.random.default_rng(key).integers(low, high, num_tokens).tolist()
    return tokens

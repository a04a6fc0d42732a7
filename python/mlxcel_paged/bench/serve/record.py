"""What is sent to a server, and what came back and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload.

    Attributes:
        prompt_token_ids: the prompt.
        output_len: tokens to generate, exactly.
        arrival_s: seconds from the start of its turn at which it is sent, if a client is free.
    """

    prompt_token_ids: list[int]
    output_len: int
    arrival_s: float = 0.0


@dataclass(slots=True)
class RequestRecord:
    """One answer. Times are seconds of `time.perf_counter`.

    Attributes:
        num_prompt_tokens: as sent.
        sent_at: when the request was about to be sent, its connection included.
        chunk_times: arrival of every chunk that carries text or the end of it.
        num_output_tokens: by the server's usage, which also counts tokens whose text came in a later chunk.
        text: the answer.
        error: why there is no whole answer, or None.
    """

    num_prompt_tokens: int
    sent_at: float
    chunk_times: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float:
        """From sending to the first chunk."""
        return self.chunk_times[0] - self.sent_at

    @property
    def latency_s(self) -> float:
        """From sending to the last chunk."""
        return self.chunk_times[-1] - self.sent_at

    @property
    def itls_s(self) -> list[float]:
        """Gaps between chunks."""
        return [late - early for early, late in pairwise(self.chunk_times)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None when there is none."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1)

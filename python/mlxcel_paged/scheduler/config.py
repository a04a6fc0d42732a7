"""Limits that the scheduler works within."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one scheduler.

    Attributes:
        max_batch_size: sequences that hold pages or caches at once, prefilling or decoding.
        max_context: tokens of prompt and output of one request.
        prefill_chunk: prompt tokens that one step computes, all sequences together.
        max_num_batched_tokens: tokens that one step computes while sequences decode, their rows included: it bounds how
            long a prompt holds them up. None leaves it to prefill_chunk.
        prefix_cache: keep full pages for later prompts that start alike, where no KV group has a window.
        vocab_size: token ids are below it.
        eos_token_ids: tokens that end a request unless it ignores them.
        pipeline_depth: steps that may be in flight when the next one is scheduled: 0 or 1.
    """

    max_batch_size: int
    max_context: int
    vocab_size: int
    prefill_chunk: int = 512
    eos_token_ids: frozenset[int] = frozenset()
    pipeline_depth: int = 0
    max_num_batched_tokens: int | None = None
    prefix_cache: bool = False

    def __post_init__(self) -> None:
        for name, minimum in (("max_batch_size", 1), ("max_context", 2), ("vocab_size", 1), ("prefill_chunk", 1)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}: {getattr(self, name)}")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens <= self.max_batch_size:
            raise ValueError(
                f"max_num_batched_tokens must be above max_batch_size {self.max_batch_size}, or prompts would not "
                f"advance beside a full batch: {self.max_num_batched_tokens}"
            )
        if self.pipeline_depth not in (0, 1):
            raise ValueError(f"pipeline_depth must be 0 or 1: {self.pipeline_depth}")

    def prefill_budget(self, num_rows: int) -> int:
        """Prompt tokens that a step with `num_rows` decode rows may compute; at least 1."""
        if not num_rows or self.max_num_batched_tokens is None:
            return self.prefill_chunk
        return min(self.prefill_chunk, self.max_num_batched_tokens - num_rows)

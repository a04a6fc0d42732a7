"""Prompts of an exact number of tokens."""

from __future__ import annotations

from typing import Any

_TEXT = (
    "A page table maps the tokens of a sequence to pages of the cache. Pages are handed out on demand, shared between "
    "sequences that begin alike, and given back when the last reader leaves. "
)


def prompt_tokens(tokenizer: Any, num_tokens: int) -> list[int]:
    """Encodes running English text and cuts it to `num_tokens` token ids."""
    tokens: list[int] = tokenizer.encode(_TEXT)
    repeated = tokens * (num_tokens // len(tokens) + 1)
    return repeated[:num_tokens]

"""Turns the token ids of one sequence into text as they arrive, never cutting a character.

A token may end in the middle of a character. Such bytes are held back until the character is complete, and
flushed once, as U+FFFD, when the sequence ends in mid-character. Special tokens have no text.
"""

from __future__ import annotations

from typing import Any, Protocol

from mlxcel_paged.text.byte_level import ByteLevelDetokenizer, ByteLevelVocab
from mlxcel_paged.text.token_spelling import TokenSpelling
from mlxcel_paged.text.window import WindowDetokenizer


class Detokenizer(Protocol):
    """The text of one sequence. The pieces that `add` and `finish` return, joined, are the whole text."""

    def add(self, token_id: int) -> str:
        """Takes one generated token and returns the text that is now certain, which may be empty."""

    def finish(self) -> str:
        """Ends the sequence and returns what was held back; nothing the second time."""


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer; what they share is built once.

    Args:
        tokenizer: a Hugging Face tokenizer or mlx-lm's TokenizerWrapper around one.

    Attributes:
        spelling: names single tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_level = ByteLevelVocab(tokenizer) if _is_byte_level(tokenizer) else None
        self.spelling = TokenSpelling(tokenizer, self._byte_level)

    def new(self) -> Detokenizer:
        """Starts the text of a new sequence."""
        if self._byte_level is not None:
            return ByteLevelDetokenizer(self._byte_level)
        return WindowDetokenizer(self._tokenizer)


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return type(getattr(backend, "decoder", None)).__name__ == "ByteLevel"

"""How many tokens a text has at least, without tokenizing it: a prompt of megabytes takes seconds to tokenize.

A token that holds a byte is at most as long as the longest one in the vocabulary that does. If each byte of a text
counts the inverse of that length, the bytes of one token count at most 1 together, so their sum over the text is no
more than its tokens, however it is cut.
"""

from __future__ import annotations

import json
import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxcel_paged.text.byte_level import byte_alphabet

# Pre-tokenizers that cut a text and leave every byte of it.
_CUTTERS = frozenset({"Digits", "Punctuation", "Split"})


class LeastTokens:
    """Bounds for one tokenizer; 0 where it does not promise that every byte of a text ends up in a token.

    Args:
        tokenizer: a Hugging Face tokenizer or mlx-lm's TokenizerWrapper around one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = getattr(tokenizer, "backend_tokenizer", None)

    def of(self, text: str) -> int:
        """At least as many tokens has `text`, which must be Unicode."""
        if self._shares is None or (self._composes and not text.isascii()):
            return 0
        counts = np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256)
        return math.ceil(float(counts @ self._shares) - 1e-6)

    @cached_property
    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {} if self._backend is None else json.loads(self._backend.to_str())
        return state

    @cached_property
    def _composes(self) -> bool:
        """Whether characters are composed (NFC), which makes a text shorter unless it is ASCII."""
        return self._state.get("normalizer") is not None

    @cached_property
    def _shares(self) -> NDArray[np.float64] | None:
        """What a byte counts, [256]; None if the bound does not hold for this tokenizer."""
        state = self._state
        if not _keeps_every_byte(state):
            return None
        alphabet = byte_alphabet()
        vocab: dict[str, int] = state["model"]["vocab"]
        tokens = [bytes(alphabet[character] for character in token) for token in vocab if alphabet.keys() >= set(token)]
        tokens += [token["content"].encode() for token in state["added_tokens"]]
        longest = np.ones(256)
        for token in tokens:
            for byte in set(token):
                longest[byte] = max(longest[byte], len(token))
        shares = 1.0 / longest
        for character, byte in alphabet.items():
            if character not in vocab:
                shares[byte] = 0.0  # a byte without a token of its own is dropped
        return shares


def _keeps_every_byte(state: dict[str, Any]) -> bool:
    model = state.get("model", {})
    return (
        model.get("type") == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and not state.get("truncation")
        and (state.get("normalizer") is None or state["normalizer"].get("type") == "NFC")
        and _cuts_to_bytes(state.get("pre_tokenizer"))
        and not any(token["lstrip"] or token["rstrip"] for token in state.get("added_tokens", ()))
    )


def _cuts_to_bytes(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    *cuts, last = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    # Bytes are spelled once: spelled a second time, one byte becomes several that count by the spelling's tokens.
    return last["type"] == "ByteLevel" and all(
        step["type"] in _CUTTERS and step.get("behavior") != "Removed" for step in cuts
    )

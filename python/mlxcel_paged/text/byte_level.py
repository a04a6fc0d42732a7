"""Detokenization of byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): every token is a known string of bytes.

The vocabulary spells each byte as one printable character; the alphabet is the one of GPT-2's `bytes_to_unicode`
(https://github.com/openai/gpt-2/blob/master/src/encoder.py). A token with a character outside that alphabet is an
added one and stands for its own text.
"""

from __future__ import annotations

import codecs
from typing import Any

from mlxcel_paged.text.special import special_token_ids


class ByteLevelVocab:
    """The bytes of every token of one tokenizer, looked up once and kept."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = special_token_ids(tokenizer)
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; none for a special token or an id that the tokenizer does not know."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._special:
            return b""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:
            return str(token).encode()


class ByteLevelDetokenizer:
    """The text of one sequence of byte-level tokens: an incremental UTF-8 decoder over their bytes."""

    def __init__(self, vocab: ByteLevelVocab) -> None:
        self._vocab = vocab
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        return self._decoder.decode(self._vocab.token_bytes(token_id))

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: the byte of each character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = byte_alphabet()

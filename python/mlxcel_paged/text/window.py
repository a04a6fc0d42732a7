"""Detokenization for tokenizers that are not byte-level: SentencePiece with byte fallback, WordPiece, tiktoken.

The text of a token may depend on its neighbour (a leading space is dropped at the start), so a short window is decoded
with and without the new tokens and the difference is the new text. Byte fallback tokens (`<0xE2>`) go through a UTF-8
decoder instead: in a window, one incomplete character would spoil the whole run of byte tokens.
"""

from __future__ import annotations

import codecs
import re
from typing import Any

from mlxcel_paged.text.special import special_token_ids

REPLACEMENT = "\ufffd"
# Tokens without certain text that are kept at most. A character needs 4; a model that emits nothing but invalid bytes
# must not make every further token slower.
_MAX_PENDING_TOKENS = 16
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class WindowDetokenizer:
    """The text of one sequence, from differences between decoded windows of its last tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = special_token_ids(tokenizer)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._context: list[int] = []  # tokens whose text is out
        self._pending: list[int] = []  # tokens whose text is not

    def add(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        byte = self._fallback_byte(token_id)
        # A space that starts the text is dropped by some tokenizers, which only their own decoding can tell.
        if byte is not None and (self._context or byte != b" "):
            held = self._flush_window()
            self._context = [token_id]
            return held + self._decoder.decode(byte)
        held = self._flush_bytes()
        self._pending.append(token_id)
        text = self._pending_text()
        if (not text or text.endswith(REPLACEMENT)) and len(self._pending) < _MAX_PENDING_TOKENS:
            return held
        return held + self._flush_window()

    def finish(self) -> str:
        return self._flush_bytes() + self._flush_window()

    def _fallback_byte(self, token_id: int) -> bytes | None:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        match = _BYTE_TOKEN.fullmatch(token) if isinstance(token, str) else None
        return bytes.fromhex(match[1]) if match else None

    def _flush_bytes(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    def _flush_window(self) -> str:
        if not self._pending:
            return ""
        text = self._pending_text()
        self._context, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        # Cleaning would take back spaces that were sent already.
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

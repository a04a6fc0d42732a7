"""How reports of log-probabilities name tokens: as text where a token is text, and as bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mlxcel_paged.request import TokenLogprobs
from mlxcel_paged.text.byte_level import ByteLevelVocab
from mlxcel_paged.text.special import special_token_ids

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class SpelledToken:
    """One token and its log-probability.

    Attributes:
        token: its text; bytes that are no whole characters are spelled `bytes:\\xf0\\x9f`, special tokens by name.
        utf8: its bytes in the answer; None if it has none there.
        logprob: natural logarithm, may be -inf.
    """

    token: str
    utf8: bytes | None
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A generated token, what was likely in its place, and where its text starts in the answer, in characters."""

    sampled: SpelledToken
    top: tuple[SpelledToken, ...]
    text_offset: int


class TokenSpelling:
    """The spelling of the tokens of one tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer or mlx-lm's TokenizerWrapper around one.
        byte_level: the bytes of its tokens, if it is byte-level.
    """

    def __init__(self, tokenizer: Any, byte_level: ByteLevelVocab | None) -> None:
        self._tokenizer = tokenizer
        self._byte_level = byte_level
        self._special = special_token_ids(tokenizer)

    def report(self, token_id: int, logprobs: TokenLogprobs, *, has_text: bool, text_offset: int) -> TokenReport:
        """The report of a generated token.

        Args:
            has_text: False for a token that ended the answer.
        """
        sampled = self.spelled(token_id, logprobs.logprob)
        if not has_text:
            sampled = SpelledToken(sampled.token, None, sampled.logprob)
        top = tuple(self.spelled(other, logprob) for other, logprob in logprobs.top)
        return TokenReport(sampled, top, text_offset)

    def spelled(self, token_id: int, logprob: float) -> SpelledToken:
        if token_id in self._special:
            return SpelledToken(str(self._tokenizer.convert_ids_to_tokens(token_id)), None, logprob)
        utf8 = self._bytes(token_id)
        return SpelledToken(_text(utf8), utf8, logprob)

    def _bytes(self, token_id: int) -> bytes:
        if self._byte_level is not None:
            return self._byte_level.token_bytes(token_id)
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return b""
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(match[1]) if match else token.replace("\u2581", " ").encode("utf-8", "replace")


def _text(utf8: bytes) -> str:
    try:
        return utf8.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)

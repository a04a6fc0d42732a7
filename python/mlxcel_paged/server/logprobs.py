"""Log-probabilities in OpenAI's two shapes: one object per token for chat, parallel arrays for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxcel_paged.text.token_spelling import SpelledToken, TokenReport

# JSON has no infinity; this is OpenAI's and vLLM's number for "never".
_LEAST_LOGPROB = -9999.0


def chat_logprobs(reports: Sequence[TokenReport]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    content = [
        {**_chat_token(report.sampled), "top_logprobs": [_chat_token(token) for token in report.top]}
        for report in reports
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(reports: Sequence[TokenReport], with_top: bool) -> dict[str, Any]:
    """`logprobs` of a completion choice.

    Args:
        with_top: whether any likely tokens were asked for.
    """
    return {
        "tokens": [report.sampled.token for report in reports],
        "token_logprobs": [_finite(report.sampled.logprob) for report in reports],
        "top_logprobs": [_top(report) for report in reports] if with_top else None,
        "text_offset": [report.text_offset for report in reports],
    }


def _top(report: TokenReport) -> dict[str, float]:
    # As OpenAI: the sampled token is always among them, so there may be one more than was asked for.
    return {token.token: _finite(token.logprob) for token in (*report.top, report.sampled)}


def _chat_token(token: SpelledToken) -> dict[str, Any]:
    utf8 = None if token.utf8 is None else list(token.utf8)
    return {"token": token.token, "logprob": _finite(token.logprob), "bytes": utf8}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)

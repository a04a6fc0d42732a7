"""Turns the token events of one sequence into text deltas with stop strings applied."""

from __future__ import annotations

from collections.abc import Sequence

from mlxcel_paged.request import FinishReason, TokenEvent
from mlxcel_paged.text.detokenize import Detokenizer
from mlxcel_paged.text.stop import StopMatcher


class SequenceText:
    """One sequence from its first token to its finish.

    Attributes:
        num_tokens: tokens generated so far: the stop token counts, what came after a stop string does not.
        finish_reason: `stop` or `length` once it has ended.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)

    def take(self, event: TokenEvent) -> str:
        """Takes an event without error and returns the text that can be sent; the finish reason may be set after it."""
        text = ""
        if event.token_id is not None:
            self.num_tokens += 1
            # The stop token has no text, whether the tokenizer calls it special or not.
            if event.finish_reason is not FinishReason.STOP:
                text = self._matcher.feed(self._detokenizer.add(event.token_id))
        if self._matcher.matched is None and event.finish_reason is not None:
            text += self._matcher.feed(self._detokenizer.finish()) + self._matcher.finish()
            self.finish_reason = event.finish_reason.value
        if self._matcher.matched is not None:
            self.finish_reason = FinishReason.STOP.value
        return text

"""Turns the token events of one sequence into deltas: text with stop strings applied, tool calls, token reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxcel_paged.request import FinishReason, TokenEvent
from mlxcel_paged.text.detokenize import Detokenizer
from mlxcel_paged.text.stop import StopMatcher
from mlxcel_paged.text.token_spelling import TokenReport, TokenSpelling
from mlxcel_paged.text.tool_calls import Parsed, ToolCallDelta, ToolCallParser

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one event adds to an answer; text may lag behind its token reports, never the other way round."""

    content: str = ""
    calls: Sequence[ToolCallDelta] = ()
    reports: Sequence[TokenReport] = ()


class SequenceText:
    """One sequence from its first token to its finish.

    Args:
        detokenizer: a new one.
        stops: stop strings.
        spelling: makes the reports of tokens that come with log-probabilities.
        tool_calls: finds calls in the text; None passes all of it as content.

    Attributes:
        num_tokens: tokens generated so far: the stop token counts, what came after a stop string does not.
        finish_reason: `stop`, `length` or `tool_calls` once it has ended.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        *,
        spelling: TokenSpelling | None = None,
        tool_calls: ToolCallParser | None = None,
    ) -> None:
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._spelling = spelling
        self._tool_calls = tool_calls
        self._num_characters = 0

    def take(self, event: TokenEvent) -> TextDelta:
        """Takes an event without error and returns what can be sent; the finish reason may be set after it."""
        text = ""
        reports: tuple[TokenReport, ...] = ()
        if event.token_id is not None:
            self.num_tokens += 1
            # The stop token has no text, whether the tokenizer calls it special or not.
            has_text = event.finish_reason is not FinishReason.STOP
            if self._spelling is not None and event.logprobs is not None:
                reports = (
                    self._spelling.report(
                        event.token_id, event.logprobs, has_text=has_text, text_offset=self._num_characters
                    ),
                )
            if has_text:
                piece = self._decoded(event.token_id)
                self._num_characters += len(piece)
                text = self._matcher.feed(piece)
        if self._matcher.matched is None and event.finish_reason is not None:
            text += self._matcher.feed(self._detokenizer.finish()) + self._matcher.finish()
            self.finish_reason = event.finish_reason.value
        if self._matcher.matched is not None:
            self.finish_reason = FinishReason.STOP.value
        parsed = self._parsed(text)
        return TextDelta(parsed.content, parsed.calls, reports)

    def _decoded(self, token_id: int) -> str:
        special = None if self._tool_calls is None else self._tool_calls.special_text(token_id)
        return self._detokenizer.add(token_id) if special is None else self._detokenizer.finish() + special

    def _parsed(self, text: str) -> Parsed:
        if self._tool_calls is None:
            return Parsed(text)
        parsed = self._tool_calls.feed(text)
        if self.finish_reason is not None:
            rest = self._tool_calls.finish()
            parsed = Parsed(parsed.content + rest.content, parsed.calls + rest.calls)
            if self._tool_calls.num_calls and self.finish_reason == FinishReason.STOP.value:
                self.finish_reason = TOOL_CALLS
        elif self._tool_calls.is_full:
            self.finish_reason = TOOL_CALLS
        return parsed

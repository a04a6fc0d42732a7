"""Shows several streams on one terminal: the first one that has not ended is live, later ones wait their turn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mlxcel_paged.request import TokenEvent


class Transcript:
    """Collects the text of requests named `"0"`, `"1"`, ... and prints it to stdout in that order.

    Args:
        tokenizer: The model's.
        prompts: What the requests continue; shown as headings when there are several.
        shown: Whether to print at all.

    Attributes:
        completions: One JSON object per prompt: `index`, `text`, `num_tokens`, `finish_reason`, `error`.
    """

    def __init__(self, tokenizer: Any, prompts: Sequence[str], *, shown: bool) -> None:
        from mlxcel_paged.text.detokenize import DetokenizerFactory
        from mlxcel_paged.text.sequence_text import SequenceText

        factory = DetokenizerFactory(tokenizer)
        self._texts = [SequenceText(factory.new(), ()) for _ in prompts]
        self._prompts = prompts
        self._shown = shown
        self._live = 0
        self._pending = [""] * len(prompts)
        self._has_heading = [False] * len(prompts)
        self.completions: list[dict[str, Any]] = [
            {"index": index, "text": "", "num_tokens": 0, "finish_reason": None, "error": None}
            for index in range(len(prompts))
        ]

    def take(self, event: TokenEvent) -> None:
        """Adds one event of one request."""
        index = int(event.request_id)
        completion = self.completions[index]
        if event.error is not None:
            completion["error"] = str(event.error)
            completion["finish_reason"] = "error"
            delta = f"[error: {event.error}]"
        else:
            delta = self._texts[index].take(event).content
            completion["text"] += delta
            completion["num_tokens"] = self._texts[index].num_tokens
            completion["finish_reason"] = self._texts[index].finish_reason
        self._pending[index] += delta
        if self._shown:
            self._print()

    def _print(self) -> None:
        while self._live < len(self._pending):
            index = self._live
            if not self._has_heading[index] and len(self._pending) > 1:
                sys.stdout.write(f"--- {index + 1}: {' '.join(self._prompts[index].split())[:70]}\n")
            self._has_heading[index] = True
            sys.stdout.write(self._pending[index])
            self._pending[index] = ""
            if self.completions[index]["finish_reason"] is None:
                break
            sys.stdout.write("\n")
            self._live += 1
        sys.stdout.flush()

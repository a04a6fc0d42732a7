"""Finds stop strings in text that arrives in pieces.

The match that ends first wins, and of those that end together the one that starts first: what is found does not depend
on how the text was cut into pieces. One Knuth-Morris-Pratt automaton per stop string; the longest state is exactly the
text that may still turn into a match, and nothing more is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes the text of one sequence through until a stop string appears in it.

    Args:
        stops: stop strings, none of them empty; no stop strings pass everything.

    Attributes:
        matched: the stop string that was found, or None so far. Afterwards nothing is passed.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self.matched: str | None = None
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""

    def feed(self, text: str) -> str:
        """Takes the next piece and returns the text that is certain to precede any match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        for position, character in enumerate(text):
            longest = self._advance(character)
            if longest:
                self.matched = longest
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen[: len(seen) - len(longest)]
        seen = self._held + text
        held_length = max(self._states)
        passed, self._held = seen[: len(seen) - held_length], seen[len(seen) - held_length :]
        return passed

    def finish(self) -> str:
        """Ends the text and returns what was held back; nothing after a match or the second time."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str:
        """Moves every automaton by one character; returns the longest stop string that ends here, or nothing."""
        longest = ""
        for index, (stop, failure) in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = failure[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                if len(stop) > len(longest):
                    longest = stop
                state = failure[state - 1]
            self._states[index] = state
        return longest


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = table[length - 1]
        if pattern[position] == pattern[length]:
            length += 1
        table[position] = length
    return table

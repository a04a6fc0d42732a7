"""Finds calls of functions in the text of an answer, as it arrives.

Two formats: the one that our own grammar enforces, whose arguments can be passed on piece by piece, and whatever lies
between a model's own markers, which mlx-lm's parser for that model reads once it is complete.
"""

from __future__ import annotations

import json
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("mlxcel_paged.server")


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one call. The first one of a call has its id and name; the arguments of all, joined, are JSON."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """What is certain of the text so far: content outside of calls, and pieces of calls."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ToolCallParser(ABC):
    """Parses one answer.

    Attributes:
        num_calls: calls that have begun (our grammar) or are complete (the model's format).
        max_calls: after as many the answer is over; None is no bound.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        self.num_calls = 0
        self.max_calls = max_calls

    @property
    def is_full(self) -> bool:
        """Whether no further call may come."""
        return self.max_calls is not None and self.num_calls >= self.max_calls

    def special_text(self, _token_id: int) -> str | None:
        """The spelling of a special token that is part of the format here; None for all others."""
        return None

    @abstractmethod
    def feed(self, text: str) -> Parsed:
        """Takes the next piece of text."""

    @abstractmethod
    def finish(self) -> Parsed:
        """Ends the text and gives what was held back."""

    def _begin(self, name: str, arguments: str, call_id: str | None = None) -> ToolCallDelta:
        self.num_calls += 1
        return ToolCallDelta(self.num_calls - 1, call_id or f"call_{uuid.uuid4().hex[:24]}", name, arguments)


class GrammarToolCalls(ToolCallParser):
    """Lines of {"name": NAME, "arguments": {...}}, spelled exactly as `GrammarCompiler.from_tool_calls` makes them."""

    _SEPARATOR = ', "arguments": '

    def __init__(self) -> None:
        super().__init__()
        self._head = ""
        self._depth = 0  # of the arguments; 0 outside of them
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> Parsed:
        parsed = Parsed()
        start = 0
        for position, character in enumerate(text):
            if not self._depth:
                self._head += character
                if character == "{" and self._head.endswith(self._SEPARATOR + "{"):
                    opening = self._head.index("{")  # after what closed the call before
                    name = json.loads(self._head[opening : -len(self._SEPARATOR) - 1] + "}")["name"]
                    parsed.calls.append(self._begin(name, ""))
                    self._head, self._depth, start = "", 1, position
            elif self._closes(character):
                parsed.calls.append(self._piece(text[start : position + 1]))
        if self._depth and text:
            parsed.calls.append(self._piece(text[start:]))
        return parsed

    def finish(self) -> Parsed:
        return Parsed()

    def _piece(self, arguments: str) -> ToolCallDelta:
        return ToolCallDelta(self.num_calls - 1, None, None, arguments)

    def _closes(self, character: str) -> bool:
        """Moves over one character of the arguments; True for the brace that ends them."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return not self._depth


@dataclass(frozen=True, slots=True)
class NativeFormat:
    """A model's own way to write calls.

    Attributes:
        start, end: markers around calls; an empty `end` means the end of the answer.
        parse: mlx-lm's parser of what is between them; given the tools too, it returns one call or a list of calls.
        special: spelling of the tokenizer's special tokens by id: markers may be such tokens, which have no text.
    """

    start: str
    end: str
    parse: Callable[[str, Any], Any]
    special: Mapping[int, str]


class NativeToolCalls(ToolCallParser):
    """Calls in the model's own format; text around them is content, white space next to a call is not."""

    def __init__(self, native: NativeFormat, tools: Any, max_calls: int | None = None) -> None:
        super().__init__(max_calls)
        self._native = native
        self._tools = tools
        self._is_inside = False
        self._held = ""  # inside: the call so far; outside: what may become a marker
        self._space = ""  # white space that is content only if more content follows
        self._space_before_call = ""

    def special_text(self, token_id: int) -> str | None:
        text = self._native.special.get(token_id)
        if text is not None and (self._is_inside or text in self._native.start):
            return text
        return None

    def feed(self, text: str) -> Parsed:
        parsed = Parsed()
        content = ""
        self._held += text
        while not self.is_full:
            if not self._is_inside:
                before, marker, after = self._held.partition(self._native.start)
                if not marker:
                    num_held = _overlap(self._held, self._native.start)
                    content += self._held[: len(self._held) - num_held]
                    self._held = self._held[len(self._held) - num_held :]
                    break
                content = self._spaced(content + before)
                self._space_before_call, self._space = self._space, ""
                self._is_inside, self._held = True, after
            else:
                inside, marker, after = self._held.partition(self._native.end) if self._native.end else ("", "", "")
                if not marker:
                    break
                self._is_inside, self._held = False, after
                content += self._take_calls(inside, parsed.calls, marker)
        return Parsed(self._spaced(content), parsed.calls)

    def finish(self) -> Parsed:
        parsed = Parsed()
        if self.is_full:
            return parsed
        held, self._held = self._held, ""
        if self._is_inside:
            self._is_inside = False
            held = self._take_calls(held, parsed.calls, "")
        content = self._spaced(held)
        space, self._space = self._space, ""
        return Parsed(content if self.num_calls else content + space, parsed.calls)

    def _take_calls(self, text: str, calls: list[ToolCallDelta], marker: str) -> str:
        """Parses what was between the markers; returns it as content if it is no call."""
        try:
            parsed = self._native.parse(text, self._tools)
            found = [_name_and_arguments(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
            if not found:
                raise ValueError("there is no call between the markers")
        except Exception as error:  # the parsers raise anything on what a model makes up
            logger.warning("what the model wrote as a tool call is none: %s", type(error).__name__)
            return f"{self._space_before_call}{self._native.start}{text}{marker}"
        for name, arguments, call_id in found:
            if not self.is_full:
                calls.append(self._begin(name, arguments, call_id))
        return ""

    def _spaced(self, content: str) -> str:
        """Holds back white space at the end of the content."""
        content = self._space + content
        kept = content.rstrip()
        self._space = content[len(kept) :]
        return kept


def _name_and_arguments(call: Any) -> tuple[str, str, str | None]:
    name, arguments, call_id = call["name"], call.get("arguments", {}), call.get("id")
    if not isinstance(name, str) or not name:
        raise ValueError("a call has no name")
    if not isinstance(arguments, str):
        arguments = _json(arguments)
    known_id = call_id if isinstance(call_id, str) and call_id else None
    return _unicode(name), _unicode(arguments), known_id if known_id is None else _unicode(known_id)


def _json(arguments: Any) -> str:
    """JSON text; escaped if a model has written half a surrogate pair, which cannot be sent as it is."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if text == _unicode(text) else json.dumps(arguments)


def _unicode(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` starts with."""
    return next(
        (length for length in range(min(len(text), len(marker)), 0, -1) if marker.startswith(text[-length:])), 0
    )

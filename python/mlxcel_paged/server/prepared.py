"""A request after the text thread has worked on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxcel_paged.grammar import Grammar
from mlxcel_paged.text.tool_calls import ToolCallParser


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the engine and the answer's parsers need.

    Attributes:
        prompts: token ids of each prompt.
        grammar: what every answer must match; None is any text.
        new_tool_calls: makes the parser of one answer's tool calls; None where there are none.
        has_content: whether an answer can have content besides tool calls.
    """

    prompts: list[list[int]]
    grammar: Grammar | None = None
    new_tool_calls: Callable[[], ToolCallParser] | None = None
    has_content: bool = True

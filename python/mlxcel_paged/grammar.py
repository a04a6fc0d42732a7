"""What the engine asks of a grammar: which tokens may come next. `text/json_grammar.py` makes them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

from mlxcel_paged.errors import PagedError


class GrammarError(PagedError, RuntimeError):
    """A grammar can say no more about an answer: its limits are exceeded, or it was fed a token it forbids."""

    slug = "grammar_failed"


class TokenMatcher(Protocol):
    """How far one answer has come in a grammar. Used by one thread."""

    def consume(self, token_ids: Seq[int]) -> None:
        """Moves on by tokens of the answer.

        Raises:
            GrammarError: a token is not allowed here, or the grammar has become too complex.
        """

    def allowed(self) -> Any:
        """Returns which tokens may come next, a NumPy array [ceil(vocab_size / 32)] uint32, token 0 in the lowest bit.

        Raises:
            GrammarError: none may, or the grammar has become too complex.
        """


class Grammar(Protocol):
    """A compiled grammar. Any thread may start an answer in it."""

    def new_matcher(self) -> TokenMatcher:
        """Starts an answer."""

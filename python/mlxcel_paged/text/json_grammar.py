"""Grammars for answers that must be JSON, compiled by llguidance (https://github.com/guidance-ai/llguidance).

Compiled grammars are kept: clients send the same schema with every request. The engine's thread starts answers in them,
the text thread compiles; a compiled grammar does not change.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxcel_paged.grammar import GrammarError
from mlxcel_paged.text.errors import TextError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

MAX_GRAMMAR_BYTES = 1 << 16
_MAX_KEPT_GRAMMARS = 64
# Enough for deep indentation. Without a bound a weak model may write white space until its tokens run out.
_JSON_OPTIONS: Mapping[str, str] = {"whitespace_pattern": r"[\x20\x0A\x09]{1,24}"}


class GrammarSyntaxError(TextError):
    """A schema that is invalid, too large, or uses what the grammar library does not know."""

    slug = "invalid_json_schema"


class CompiledGrammar:
    """A grammar over one tokenizer.

    Args:
        matcher: at the start of an answer; never moved.
        num_words: length of a mask.
    """

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    def new_matcher(self) -> AnswerMatcher:
        return AnswerMatcher(self._matcher.deep_copy(), self._num_words)


class AnswerMatcher:
    """How far one answer has come in a grammar."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._mask: NDArray[np.uint32] = np.zeros(num_words, dtype=np.uint32)

    def consume(self, token_ids: Sequence[int]) -> None:
        if not self._matcher.consume_tokens(list(token_ids)):
            raise GrammarError(self._state())

    def allowed(self) -> NDArray[np.uint32]:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error() or not self._mask.any():
            raise GrammarError(self._state())
        return self._mask.copy()

    def _state(self) -> str:
        """Why it cannot go on. The library's own message would carry the answer's text into the log."""
        return f"the grammar cannot go on: {self._matcher.stop_reason()}"


class GrammarCompiler:
    """Compiles grammars for one model. One thread at a time calls this.

    Args:
        tokenizer: a fast Hugging Face tokenizer or mlx-lm's TokenizerWrapper around one.
        vocab_size: number of token ids that the model has embeddings for.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._guided_tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def from_json_schema(self, schema: Mapping[str, Any]) -> CompiledGrammar:
        """A grammar of the JSON values that a schema describes.

        Raises:
            GrammarSyntaxError: the schema cannot be compiled; the message says why.
        """
        from llguidance import LLMatcher

        _require_no_options(schema)
        try:
            grammar = LLMatcher.grammar_from_json_schema(dict(schema), overrides=dict(_JSON_OPTIONS))  # type: ignore[arg-type]
        except ValueError as error:  # an integer beyond 64 bits
            raise GrammarSyntaxError(f"the schema cannot be used: {str(error)[:300]}") from None
        return self._compiled(grammar)

    def from_tool_calls(self, tools: Sequence[tuple[str, Mapping[str, Any]]], *, several: bool) -> CompiledGrammar:
        """A grammar of calls of functions, one a line: {"name": NAME, "arguments": ARGUMENTS}.

        Args:
            tools: name and JSON schema of the arguments of each function.
            several: whether there may be more than one call.

        Raises:
            GrammarSyntaxError: a schema cannot be compiled.
        """
        calls = []
        for name, schema in tools:
            _require_no_options(schema)
            head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
            arguments = json.dumps({**schema, "x-guidance": _JSON_OPTIONS})
            calls.append(f'{head} %json {arguments} "}}"')
        lines = ["start: call" + (' ("\\n" call)*' if several else ""), "call: " + "\n    | ".join(calls)]
        return self._compiled("%llguidance {}\n" + "\n".join(lines) + "\n")

    def _compiled(self, grammar: str) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        kept = self._kept.get(grammar)
        if kept is not None:
            self._kept.move_to_end(grammar)
            return kept
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise GrammarSyntaxError(f"the grammar has {len(grammar)} bytes, at most {MAX_GRAMMAR_BYTES} are allowed")
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarSyntaxError(f"the schema cannot be used: {matcher.get_error()[:300]}")
        compiled = CompiledGrammar(matcher, -(-self._tokens().vocab_size // 32))
        try:
            compiled.new_matcher().allowed()
        except GrammarError:  # {"$ref": "#"} compiles, and matches nothing
            raise GrammarSyntaxError("the schema cannot be used: no answer can begin to match it") from None
        self._kept[grammar] = compiled
        if len(self._kept) > _MAX_KEPT_GRAMMARS:
            self._kept.popitem(last=False)
        return compiled

    def _tokens(self) -> LLTokenizer:
        """llguidance's view of the vocabulary; takes a good part of a second the first time."""
        if self._guided_tokenizer is None:
            from llguidance import LLTokenizer
            from tokenizers import Tokenizer

            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if not isinstance(backend, Tokenizer):
                raise GrammarSyntaxError("this model's tokenizer cannot be constrained: it is not a fast one")
            backend = Tokenizer.from_str(backend.to_str())
            backend.no_padding()
            backend.no_truncation()
            num_tokens = max(self._vocab_size, backend.get_vocab_size())
            try:
                self._guided_tokenizer = LLTokenizer(
                    backend.to_str(), n_vocab=num_tokens, eos_token=_eos_token_ids(self._tokenizer)
                )
            except ValueError as error:
                raise GrammarSyntaxError(f"this model's tokenizer cannot be constrained: {error}") from error
        return self._guided_tokenizer


def _eos_token_ids(tokenizer: Any) -> list[int]:
    """mlx-lm's wrapper knows several, Hugging Face's tokenizers one."""
    token_ids = getattr(tokenizer, "eos_token_ids", None) or tokenizer.eos_token_id
    return [token_ids] if isinstance(token_ids, int) else sorted(token_ids)


def _require_no_options(schema: Mapping[str, Any]) -> None:
    # It would set the library's options from outside, its limits among them.
    if "x-guidance" in schema:
        raise GrammarSyntaxError("the schema has the key x-guidance, which is not allowed")

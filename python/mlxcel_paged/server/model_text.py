"""The names and text tools of one loaded model."""

from __future__ import annotations

from typing import Any

from mlxcel_paged.server.config import ServerConfig
from mlxcel_paged.server.engine_api import ServedModel
from mlxcel_paged.server.errors import ApiError
from mlxcel_paged.text.detokenize import DetokenizerFactory
from mlxcel_paged.text.json_grammar import GrammarCompiler
from mlxcel_paged.text.prompt import PromptEncoder
from mlxcel_paged.text.special import special_tokens
from mlxcel_paged.text.tool_calls import NativeFormat
from mlxcel_paged.text.tool_prompt import knows_tools


class ModelText:
    """Built once per loaded model.

    Attributes:
        name: the served name.
        encoder: makes prompts; used by the text thread.
        grammars: compiles grammars; used by the text thread.
        detokenizers: makes a detokenizer per sequence.
        knows_tools: whether the chat template shows tools to the model.
        native_tool_calls: how the model writes calls of its own accord; None if nobody knows.
    """

    def __init__(self, model: ServedModel, config: ServerConfig) -> None:
        self.name = config.served_model_name or model.name
        self._aliases = frozenset(config.model_aliases)
        self.encoder = PromptEncoder(model.tokenizer, model.vocab_size, model.max_context)
        self.detokenizers = DetokenizerFactory(model.tokenizer)
        self.grammars = GrammarCompiler(model.tokenizer, model.vocab_size)
        self._special_tokens = special_tokens(model.tokenizer)
        self.knows_tools = knows_tools(model.tokenizer)
        self.native_tool_calls = self._native_tool_calls(model.tokenizer)

    def _native_tool_calls(self, tokenizer: Any) -> NativeFormat | None:
        """mlx-lm's parser for the model, where it has one."""
        if not (self.knows_tools and getattr(tokenizer, "has_tool_calling", False)):
            return None
        special = {token_id: text for text, token_id in self._special_tokens.items()}
        return NativeFormat(tokenizer.tool_call_start, tokenizer.tool_call_end, tokenizer.tool_parser, special)

    def is_named(self, name: str) -> bool:
        """Whether requests may call the model so."""
        return name == self.name or name in self._aliases

    def require_name(self, name: str | None) -> None:
        """Accepts the served name, its aliases, and no name at all.

        Raises:
            ApiError: 404, another model is asked for.
        """
        if name is not None and not self.is_named(name):
            message = f"model {name!r} does not exist here; this server has {self.name!r}"
            raise ApiError(404, "model_not_found", message, param="model")

    def split_stops(self, stops: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Parts stop strings into those that are matched on text and those that spell a special token.

        Special tokens have no text, so that such a string would never be seen in it.
        """
        text = tuple(stop for stop in stops if stop not in self._special_tokens)
        return text, tuple(self._special_tokens[stop] for stop in stops if stop in self._special_tokens)

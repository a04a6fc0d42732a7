"""Makes prompts: text, token ids or chat messages into the token ids that a request carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxcel_paged.text.errors import PromptTooLongError, TextError
from mlxcel_paged.text.least_tokens import LeastTokens
from mlxcel_paged.text.template import render_chat


class PromptEncoder:
    """Encodes prompts for one model. The tokenizer is not safe to share, so one thread at a time calls this.

    Args:
        tokenizer: a Hugging Face tokenizer or mlx-lm's TokenizerWrapper around one.
        vocab_size: number of token ids that the model has embeddings for.
        max_context: tokens that the model can hold; text that surely has more is refused before it is tokenized.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_context: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._least_tokens = LeastTokens(tokenizer)

    def from_text(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer adds by itself (often a BOS).

        Raises:
            TextError: the text is empty, is no Unicode text, or has no tokens.
            PromptTooLongError: it cannot fit the context.
        """
        if not text:
            raise TextError("the prompt is empty")
        return self._encode(text, add_special_tokens=True)

    def from_token_ids(self, token_ids: Sequence[int]) -> list[int]:
        """Checks a prompt that is already tokenized.

        Raises:
            TextError: there is no id, or one is outside the model's vocabulary.
        """
        if not token_ids:
            raise TextError("the prompt is empty")
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise TextError(f"token ids must be between 0 and {self._vocab_size - 1}, got {token_id}")
        return list(token_ids)

    def from_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a conversation, rendered by the model's chat template up to the start of the answer.

        Args:
            messages, tools: as the template takes them.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
            TextError: the rendered text is empty or no Unicode text.
            PromptTooLongError: it cannot fit the context.
        """
        # The template writes the special tokens itself.
        return self._encode(render_chat(self._tokenizer, messages, tools), add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        require_unicode(text)
        # A character has at most 4 bytes, and a token at least one.
        if self._max_context is not None and 4 * len(text) > self._max_context:
            least = self._least_tokens.of(text)
            if least > self._max_context:
                raise PromptTooLongError(least, self._max_context)
        token_ids = [int(token_id) for token_id in self._tokenizer.encode(text, add_special_tokens=add_special_tokens)]
        if not token_ids:
            raise TextError("the prompt has no tokens")
        return self.from_token_ids(token_ids)


def require_unicode(text: str) -> None:
    """Refuses text with a lone surrogate: it stands for no character and cannot be encoded.

    Raises:
        TextError: names the place of the surrogate.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(
            f"the text holds a lone surrogate (U+{ord(text[error.start]):04X} at position {error.start})"
        ) from None

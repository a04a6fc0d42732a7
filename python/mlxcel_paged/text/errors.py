"""What can be wrong with the text of a request."""

from __future__ import annotations


class TextError(ValueError):
    """Text or token ids that cannot become a prompt. `slug` names the kind."""

    slug = "invalid_prompt"


class ChatTemplateError(TextError):
    """The model has no chat template, or its template refused the messages."""

    slug = "chat_template_error"


class PromptTooLongError(TextError):
    """The text cannot fit the context, however it is cut into tokens."""

    slug = "context_length_exceeded"

    def __init__(self, num_tokens: int, max_context: int) -> None:
        super().__init__(
            f"the prompt's {num_tokens} tokens, if not more, do not fit the context of {max_context} tokens"
        )

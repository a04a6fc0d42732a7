"""What can be wrong with the text of a request."""

from __future__ import annotations


class TextError(ValueError):
    """Text or token ids that cannot become a prompt. `slug` names the kind."""

    slug = "invalid_prompt"


class ChatTemplateError(TextError):
    """The model has no chat template, or its template refused the messages."""

    slug = "chat_template_error"

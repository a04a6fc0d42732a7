"""Renders chat messages with the template that ships with the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from mlxcel_paged.text.errors import ChatTemplateError


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The prompt text of a conversation, up to and including the header of the assistant's next turn.

    Args:
        tokenizer: a Hugging Face tokenizer or mlx-lm's TokenizerWrapper around one.
        messages: `role` and `content` of each message, oldest first; calls have their arguments as objects.
        tools: OpenAI's tool objects, which the template shows to the model if it knows tools.

    Raises:
        ChatTemplateError: the model has no template, or the template refuses these messages.
    """
    if not has_chat_template(tokenizer):
        raise ChatTemplateError("this model has no chat template; use /v1/completions with a plain prompt")
    # Each message is copied: a template, or the tokenizer around it, may change what it is given.
    conversation = copy.deepcopy([dict(message) for message in messages])
    offered: dict[str, Any] = {"tools": copy.deepcopy(list(tools))} if tools else {}
    try:
        rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **offered)
    except Exception as error:  # templates are programs of the model's makers and raise anything
        raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from error
    if not isinstance(rendered, str) or not rendered:
        raise ChatTemplateError("the model's chat template rendered no text for these messages")
    return rendered


def has_chat_template(tokenizer: Any) -> bool:
    """Whether conversations can be rendered at all."""
    wrapped = getattr(tokenizer, "has_chat_template", None)
    if isinstance(wrapped, bool):
        return wrapped
    return getattr(tokenizer, "chat_template", None) is not None

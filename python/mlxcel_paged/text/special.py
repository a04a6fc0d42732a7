"""Which tokens are special: they steer the model and have no text."""

from __future__ import annotations

from typing import Any


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the special tokens: those with a role (BOS, EOS, ...) and those that the vocabulary marks as special."""
    marked = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {token_id for token_id, token in marked.items() if token.special}


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The spelling of every special token and its id."""
    return {str(tokenizer.convert_ids_to_tokens(token_id)): token_id for token_id in special_token_ids(tokenizer)}

"""Prompts: text, ids and conversations become token ids or a typed error."""

from __future__ import annotations

import pytest

from mlxcel_paged.text.errors import ChatTemplateError, TextError
from mlxcel_paged.text.prompt import PromptEncoder
from mlxcel_paged.text.template import render_chat

from .byte_tokenizer import byte_tokenizer, sentencepiece_tokenizer, spell

BYTES = byte_tokenizer()
ENCODER = PromptEncoder(BYTES, vocab_size=len(BYTES))


@pytest.mark.parametrize("text", ["hello", "😀 漢字", "\x00", " "])
def test_text_is_encoded(text: str) -> None:
    assert ENCODER.from_text(text) == spell(BYTES, text)


def test_an_empty_text_is_refused_even_where_the_tokenizer_adds_a_token() -> None:
    for tokenizer in (BYTES, sentencepiece_tokenizer()):
        with pytest.raises(TextError, match="empty"):
            PromptEncoder(tokenizer, vocab_size=len(tokenizer)).from_text("")


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00", "\udfff!"])
def test_a_lone_surrogate_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(TextError, match="lone surrogate"):
        ENCODER.from_text(text)
    with pytest.raises(TextError, match="lone surrogate"):
        ENCODER.from_messages([{"role": "user", "content": text}])


def test_token_ids_are_range_checked() -> None:
    last = len(BYTES) - 1
    assert ENCODER.from_token_ids([0, last]) == [0, last]
    for token_ids in ([last + 1], [0, -1], [2**63]):
        with pytest.raises(TextError, match=f"between 0 and {last}, got"):
            ENCODER.from_token_ids(token_ids)
    with pytest.raises(TextError, match="empty"):
        ENCODER.from_token_ids([])


def test_a_tokenizer_that_knows_more_ids_than_the_model_is_refused_not_read_out_of_bounds() -> None:
    with pytest.raises(TextError, match="between 0 and 9"):
        PromptEncoder(BYTES, vocab_size=10).from_text("zz")


def test_messages_are_rendered_up_to_the_answer() -> None:
    text = render_chat(BYTES, [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert text == "<|turn|>system\nS<|end|>\n<|turn|>user\nU<|end|>\n<|turn|>assistant\n"
    token_ids = ENCODER.from_messages([{"role": "user", "content": "U"}])
    assert token_ids[0] == BYTES.convert_tokens_to_ids("<|turn|>")
    assert token_ids.count(BYTES.eos_token_id) == 1


def test_what_the_template_refuses_is_told() -> None:
    with pytest.raises(ChatTemplateError, match="tool turns are not known"):
        ENCODER.from_messages([{"role": "tool", "content": "x"}])


def test_a_broken_template_and_no_template_are_told() -> None:
    broken = byte_tokenizer("{{ messages[0].content | no_such_filter }}")
    with pytest.raises(ChatTemplateError, match="no_such_filter"):
        render_chat(broken, [{"role": "user", "content": "x"}])
    with pytest.raises(ChatTemplateError, match="no chat template"):
        render_chat(byte_tokenizer(None), [{"role": "user", "content": "x"}])
    with pytest.raises(ChatTemplateError, match="no text"):
        render_chat(byte_tokenizer("{# nothing #}"), [{"role": "user", "content": "x"}])


def test_a_template_cannot_reach_the_host() -> None:
    nosy = byte_tokenizer("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ChatTemplateError):
        render_chat(nosy, [{"role": "user", "content": "x"}])


def test_mlx_lms_wrapper_is_accepted() -> None:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    wrapped = TokenizerWrapper(BYTES)
    encoder = PromptEncoder(wrapped, vocab_size=len(BYTES))
    messages = [{"role": "user", "content": "hi"}]
    assert encoder.from_messages(messages) == ENCODER.from_messages(messages)
    assert encoder.from_text("hi") == ENCODER.from_text("hi")
    with pytest.raises(ChatTemplateError, match="no chat template"):
        PromptEncoder(TokenizerWrapper(byte_tokenizer(None)), 300).from_messages(messages)

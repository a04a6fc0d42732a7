"""A lower bound on tokens: never above what the tokenizer gives, near it for text, and none where it would not hold."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxcel_paged.errors import ModelNotFoundError
from mlxcel_paged.text.errors import PromptTooLongError
from mlxcel_paged.text.least_tokens import LeastTokens
from mlxcel_paged.text.prompt import PromptEncoder

from .byte_tokenizer import byte_tokenizer, sentencepiece_tokenizer


def merging_tokenizer(normalizer: Any = None, missing: str = "", **special: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE with tokens of up to eight letters and eight spaces."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(missing))
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges = []
    for first, second in [("a", "b"), ("ab", "ab"), ("abab", "abab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ĠĠĠĠ", "ĠĠĠĠ")]:
        vocab[first + second] = len(vocab)
        merges.append((first, second))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|a long name of a special token|>", special=True, **special)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def twice_spelled_tokenizer() -> PreTrainedTokenizerFast:
    """Spells bytes, then the bytes of that spelling: a space is "Ġ", then "Äł", and four of those are one token."""
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ä", "ł"), ("Äł", "Äł"), ("ÄłÄł", "ÄłÄł")]
    vocab.update({first + second: len(vocab) + index for index, (first, second) in enumerate(merges)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([spelling, spelling])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def count(tokenizer: Any, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_tokenizer(),
        merging_tokenizer(),
        merging_tokenizer(normalizers.NFC()),
        merging_tokenizer(missing="Ċé"),
        twice_spelled_tokenizer(),
    ],
)
def test_no_text_has_fewer_tokens(tokenizer: Any) -> None:
    bound = LeastTokens(tokenizer)
    draw = random.Random(1)
    pieces = [
        "ab",
        "a",
        "b",
        " ",
        "  ",
        "é",
        "e\u0301",
        "漢",
        "😀",
        "\x00",
        "<|a long name of a special token|>",
        "Ġ",
        "abab",
    ]
    for _ in range(300):
        text = "".join(draw.choice(pieces) * draw.choice((1, 1, 4, 40)) for _ in range(draw.randint(1, 12)))
        assert bound.of(text) <= count(tokenizer, text)


def test_the_bound_is_met_where_all_tokens_are_the_longest() -> None:
    tokenizer = byte_tokenizer()
    bound = LeastTokens(tokenizer)
    assert bound.of("x" * 513) == count(tokenizer, "x" * 513) == 513
    assert bound.of("") == 0
    # The special token has 34 bytes, "l" among them; "b" is in tokens of up to eight.
    assert LeastTokens(merging_tokenizer()).of("l" * 340) == 10
    assert LeastTokens(merging_tokenizer()).of("b" * 340) == 43
    assert LeastTokens(merging_tokenizer()).of("xy" * 340) == 680


@pytest.mark.parametrize(
    "tokenizer",
    [
        sentencepiece_tokenizer(),
        merging_tokenizer(normalizers.NFKC()),
        merging_tokenizer(normalizers.Lowercase()),
        merging_tokenizer(lstrip=True),
        merging_tokenizer(rstrip=True),
        object(),
    ],
)
def test_there_is_no_bound_where_bytes_may_vanish(tokenizer: Any) -> None:
    assert LeastTokens(tokenizer).of("x" * 10_000) == 0


def test_bytes_without_a_token_are_not_counted() -> None:
    bound = LeastTokens(merging_tokenizer(missing="Ċ"))
    assert bound.of("\n" * 100) == 0
    assert bound.of("x\n" * 100) == 100


def test_composed_characters_are_not_counted() -> None:
    bound = LeastTokens(merging_tokenizer(normalizers.NFC()))
    assert bound.of("x" * 100) == 100
    assert bound.of("e\u0301" * 100) == 0


class Untouchable:
    """A tokenizer that may be looked at and not be used."""

    def __init__(self, tokenizer: Any) -> None:
        self.backend_tokenizer = tokenizer.backend_tokenizer

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise AssertionError("a prompt that cannot fit was tokenized")


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    encoder = PromptEncoder(Untouchable(byte_tokenizer()), 300, max_context=512)
    with pytest.raises(PromptTooLongError, match="513 tokens, if not more, do not fit the context of 512"):
        encoder.from_text("x" * 513)
    with pytest.raises(AssertionError, match="tokenized"):
        encoder.from_text("x" * 512)
    tokenizer = byte_tokenizer()
    assert len(PromptEncoder(tokenizer, len(tokenizer)).from_text("x" * 600)) == 600
    assert len(PromptEncoder(tokenizer, len(tokenizer), max_context=600).from_text("x" * 600)) == 600


def test_the_bound_of_a_trained_vocabulary_is_of_use() -> None:
    """English of ten times the context is refused at once."""
    from mlxcel_paged.models.embedded import embedded_gguf
    from mlxcel_paged.models.loader import load_model

    try:
        embedded_gguf()
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    tokenizer = load_model("embedded", device="cpu").tokenizer
    text = "The quick brown fox jumps over the lazy dog, and 17 of its friends look on.\n" * 200
    least, found = LeastTokens(tokenizer).of(text), count(tokenizer, text)
    assert found / 10 < least <= found

"""Text that comes out of tokens: whole characters only, and the same text however it is cut."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel_paged.text.detokenize import DetokenizerFactory
from mlxcel_paged.text.window import WindowDetokenizer

from .byte_tokenizer import byte_tokenizer, sentencepiece_tokenizer, spell

BYTES = byte_tokenizer()
PIECES = sentencepiece_tokenizer()
BYTE_FACTORY = DetokenizerFactory(BYTES)
TEXTS = [
    "plain ascii",
    "naïve café",
    "漢字かな交じり文",
    "😀",
    "👩\u200d👩\u200d👧\u200d👦 family",
    "🇩🇪🇯🇵",
    "e\u0301 combining",
    "\ufffd a real replacement character",
    "\x00 zero, \n newline",
]


def deltas(detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_is_sent_only_when_its_last_byte_came(text: str) -> None:
    got = deltas(BYTE_FACTORY.new(), spell(BYTES, text))
    assert "".join(got) == text
    assert all(len(delta) <= 1 for delta in got)
    assert got[-1] == ""


def test_the_end_in_mid_character_is_flushed_once() -> None:
    detokenizer = BYTE_FACTORY.new()
    assert "".join(detokenizer.add(token) for token in spell(BYTES, "ok 😀".encode()[:-1])) == "ok "
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@given(data=st.binary(max_size=40))
def test_invalid_bytes_decode_as_python_does(data: bytes) -> None:
    assert "".join(deltas(BYTE_FACTORY.new(), spell(BYTES, data))) == data.decode(errors="replace")


@given(data=st.binary(max_size=40))
def test_byte_level_text_equals_the_tokenizers_own(data: bytes) -> None:
    token_ids = spell(BYTES, data)
    assert "".join(deltas(BYTE_FACTORY.new(), token_ids)) == BYTES.decode(token_ids, clean_up_tokenization_spaces=False)


def test_special_tokens_have_no_text_and_unknown_ids_neither() -> None:
    token_ids = [*spell(BYTES, "a"), BYTES.eos_token_id, *spell(BYTES, "b"), 99_999]
    assert "".join(deltas(BYTE_FACTORY.new(), token_ids)) == "ab"


def test_an_added_token_stands_for_its_own_text() -> None:
    token_ids = [BYTES.convert_tokens_to_ids("<tool call>")]
    assert "".join(deltas(BYTE_FACTORY.new(), token_ids)) == "<tool call>"


def test_a_special_token_between_the_bytes_of_a_character_does_not_split_it() -> None:
    first, *rest = spell(BYTES, "é")
    assert "".join(deltas(BYTE_FACTORY.new(), [first, BYTES.eos_token_id, *rest])) == "é"


def test_sequences_share_no_text() -> None:
    left, right = BYTE_FACTORY.new(), BYTE_FACTORY.new()
    first, second = spell(BYTES, "é")
    assert left.add(first) == ""
    assert right.add(spell(BYTES, "x")[0]) == "x"
    assert left.add(second) == "é"


def test_a_sentencepiece_tokenizer_gets_the_window() -> None:
    assert isinstance(DetokenizerFactory(PIECES).new(), WindowDetokenizer)


@pytest.mark.parametrize("text", ["ab ab", "a b  ab", "é 😀 b", "\nab 漢字 a", "日本", " a", "a\n b"])
def test_sentencepiece_text_is_the_prompt_again(text: str) -> None:
    token_ids = PIECES.encode(text, add_special_tokens=False)
    got = deltas(DetokenizerFactory(PIECES).new(), token_ids)
    assert "".join(got) == PIECES.decode(token_ids, clean_up_tokenization_spaces=False)
    assert not any("\ufffd" in delta for delta in got)


@settings(max_examples=1000)
@given(token_ids=st.lists(st.sampled_from(range(len(PIECES))), max_size=30))
def test_any_sentencepiece_tokens_give_the_tokenizers_text_up_to_replacements(token_ids: list[int]) -> None:
    got = "".join(deltas(DetokenizerFactory(PIECES).new(), token_ids))
    whole = PIECES.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if "\ufffd" not in whole:
        assert got == whole
    # One invalid byte makes the tokenizer replace a whole run of bytes; ours replaces what is invalid.
    assert got.count("\ufffd") <= whole.count("\ufffd")


@pytest.mark.parametrize(
    "pieces", [["<0x20>"], ["<0x20>", "▁a"], ["<0x20>", "<0xC3>", "<0xA9>"], ["<0x20>", "<0x20>", "b"]]
)
def test_a_space_byte_at_the_start_is_treated_as_the_tokenizer_treats_it(pieces: list[str]) -> None:
    token_ids = PIECES.convert_tokens_to_ids(pieces)
    got = "".join(deltas(DetokenizerFactory(PIECES).new(), token_ids))
    assert got == PIECES.decode(token_ids, clean_up_tokenization_spaces=False)


def test_an_incomplete_byte_run_is_flushed_before_the_next_piece() -> None:
    detokenizer = DetokenizerFactory(PIECES).new()
    tokens = PIECES.convert_tokens_to_ids(["<0xF0>", "<0x9F>", "▁a"])
    assert [detokenizer.add(token) for token in tokens] == ["", "", "\ufffd a"]
    assert detokenizer.finish() == ""


class _Opaque:
    """A tokenizer of byte tokens that only decodes whole lists, as tiktoken-style ones do."""

    all_special_ids = ()

    def decode(self, token_ids, **_options) -> str:
        return bytes(token_ids).decode(errors="replace")

    def convert_ids_to_tokens(self, _token_id):
        return b""


@pytest.mark.parametrize("text", TEXTS)
def test_the_window_holds_characters_back_when_tokens_cannot_be_seen_into(text: str) -> None:
    got = deltas(WindowDetokenizer(_Opaque()), list(text.encode()))
    assert "".join(got) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in got)


def test_endless_invalid_bytes_are_not_held_for_ever() -> None:
    detokenizer = WindowDetokenizer(_Opaque())
    sent = [detokenizer.add(0xFF) for _ in range(64)]
    assert "".join(sent) + detokenizer.finish() == "\ufffd" * 64
    assert sum(bool(delta) for delta in sent) >= 4


def test_random_cuts_of_random_text_join_to_the_text() -> None:
    rng = random.Random(0)
    alphabet = "aé漢😀\u200d\u0301 \n"
    for _ in range(200):
        text = "".join(rng.choices(alphabet, k=rng.randrange(12)))
        assert "".join(deltas(BYTE_FACTORY.new(), spell(BYTES, text))) == text

"""From token events to the text and the finish reason of one sequence."""

from __future__ import annotations

from mlxcel_paged.request import FinishReason, TokenEvent
from mlxcel_paged.text.detokenize import DetokenizerFactory
from mlxcel_paged.text.sequence_text import SequenceText

from .byte_tokenizer import byte_tokenizer, spell

BYTES = byte_tokenizer()
FACTORY = DetokenizerFactory(BYTES)


def run(
    data: str | bytes, stops: list[str], last: FinishReason, last_token: int | None = None
) -> tuple[str, SequenceText]:
    """Feeds one event per byte up to the finish, and the last event with or without a token of its own."""
    sequence = SequenceText(FACTORY.new(), stops)
    text = ""
    events = [TokenEvent("r", token_id) for token_id in spell(BYTES, data)]
    for event in [*events, TokenEvent("r", last_token, last)]:
        text += sequence.take(event).content
        if sequence.finish_reason is not None:
            break
    return text, sequence


def test_the_stop_token_counts_and_has_no_text_even_where_it_is_an_ordinary_token() -> None:
    [dot] = spell(BYTES, ".")
    text, sequence = run("ab", [], FinishReason.STOP, dot)
    assert (text, sequence.num_tokens, sequence.finish_reason) == ("ab", 3, "stop")


def test_the_last_token_of_a_length_finish_has_text() -> None:
    [letter] = spell(BYTES, "c")
    text, sequence = run("ab", [], FinishReason.LENGTH, letter)
    assert (text, sequence.num_tokens, sequence.finish_reason) == ("abc", 3, "length")


def test_a_stop_string_that_the_last_token_completes_is_a_stop() -> None:
    [letter] = spell(BYTES, "c")
    text, sequence = run("ab", ["bc"], FinishReason.LENGTH, letter)
    assert (text, sequence.finish_reason) == ("a", "stop")


def test_held_text_and_held_bytes_are_flushed_in_order() -> None:
    text, sequence = run(b"ab" + "é".encode()[:1], ["b\ufffdx"], FinishReason.LENGTH)
    assert (text, sequence.num_tokens, sequence.finish_reason) == ("ab\ufffd", 3, "length")


def test_a_stop_string_may_end_in_a_flushed_character() -> None:
    text, sequence = run(b"ab" + "é".encode()[:1], ["b\ufffd"], FinishReason.LENGTH)
    assert (text, sequence.finish_reason) == ("a", "stop")


def test_a_sequence_without_tokens_has_no_text() -> None:
    text, sequence = run("", ["x"], FinishReason.LENGTH)
    assert (text, sequence.num_tokens, sequence.finish_reason) == ("", 0, "length")

"""A stop string is missed where it does not end with a token, or its text leaks (vLLM #3574, #3572, #2577, #3026)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest

from mlxcel_paged.request import FinishReason, TokenEvent
from mlxcel_paged.text.sequence_text import SequenceText
from server.running_server import RunningServer, stream_text
from server.scripted_engine import ScriptedEngine

STOP = "###STOP"


class Pieces:
    """A detokenizer whose tokens are pieces of text by number."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def add(self, token_id: int) -> str:
        return self._pieces[token_id]

    def finish(self) -> str:
        return ""


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], SequenceText]:
    """The deltas of an answer made of these tokens, which ends by length if no stop string comes."""
    sequence = SequenceText(Pieces(pieces), stops)
    deltas = []
    for number in range(len(pieces)):
        reason = FinishReason.LENGTH if number == len(pieces) - 1 else None
        deltas.append(sequence.take(TokenEvent("r", number, reason)).content)
        if sequence.finish_reason is not None:
            break
    return deltas, sequence


def cuts(text: str, max_pieces: int) -> Iterator[list[str]]:
    """Every way to cut a text into at most so many pieces."""
    for num_cuts in range(max_pieces):
        for places in combinations(range(1, len(text)), num_cuts):
            ends = [0, *places, len(text)]
            yield [text[start:end] for start, end in pairwise(ends)]


def test_every_cut_of_the_stop_string_and_its_neighbourhood() -> None:
    for pieces in cuts(STOP, 5):
        for before, after in (("foo", "bar"), ("#", "#"), ("##", ""), ("", "x")):
            # Once the stop string starts and ends with tokens of its own, once inside tokens.
            inside = [before + pieces[0], *pieces[1:]]
            inside[-1] += after
            for tokens in ([before, *pieces, after], inside):
                deltas, sequence = run(tokens, [STOP])
                assert "".join(deltas) == before, tokens
                assert sequence.finish_reason == "stop"


def test_a_text_that_only_begins_like_a_stop_string_is_not_lost() -> None:
    for end in range(1, len(STOP)):
        for pieces in cuts("ab" + STOP[:end], 3):
            deltas, sequence = run(pieces, [STOP, "zz"])
            assert "".join(deltas) == "ab" + STOP[:end]
            assert sequence.finish_reason == "length"
        deltas, sequence = run([STOP[:end], "!", STOP[:end]], [STOP])
        assert "".join(deltas) == STOP[:end] + "!" + STOP[:end]


def test_of_overlapping_stop_strings_the_one_that_ends_first_wins() -> None:
    for stops in (["ab", "abc"], ["abc", "ab"]):
        assert "".join(run(["xa", "bc"], stops)[0]) == "x"
    assert "".join(run(["aab", "aac"], ["aabaac", "baa"])[0]) == "aa"


@pytest.fixture(scope="module")
def server() -> Any:
    running = RunningServer(ScriptedEngine())
    yield running
    running.wait_idle()
    running.close()
    running.engine.stop()


@pytest.mark.parametrize("n", [1, 3])
def test_nothing_follows_a_stop_in_a_stream_and_held_back_text_comes_at_the_end(server: RunningServer, n: int) -> None:
    for prompt, stop, text, reason in (
        ("foo###STOPbar", STOP, "foo", "stop"),
        ("foo###STO", STOP, "foo###STO", "length"),
        ("Grüße###STOP", ["ß", "x"], "Grü", "stop"),
    ):
        fields = {"prompt": prompt, "stop": stop, "max_tokens": len(prompt.encode()), "n": n}
        for choice in server.complete(**fields)["choices"]:
            assert (choice["text"], choice["finish_reason"]) == (text, reason)
        events = server.events("/v1/completions", **fields)
        for index in range(n):
            choices = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
            assert stream_text(events, index) == text
            assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [reason]

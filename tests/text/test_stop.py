"""Stop strings: found across every border, nothing sent from the match on, nothing lost before it."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_paged.text.stop import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """Feeds the pieces up to a match, as a server does; returns the text sent and the stop string."""
    matcher = StopMatcher(stops)
    sent = ""
    for piece in pieces:
        sent += matcher.feed(piece)
        if matcher.matched is not None:
            return sent, matcher.matched
    return sent + matcher.finish(), None


def oracle(stops: list[str], text: str) -> tuple[str, str | None]:
    """The first prefix of the text that ends in a stop string, found by looking at every prefix."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def splits(text: str, num_pieces: int) -> list[list[str]]:
    borders = combinations(range(1, len(text)), num_pieces - 1)
    return [[text[a:b] for a, b in zip((0, *cuts), (*cuts, len(text)), strict=True)] for cuts in borders]


@pytest.mark.parametrize("num_pieces", [1, 2, 3, 4, 5])
def test_every_split_of_a_stop_string(num_pieces: int) -> None:
    for pieces in splits("###STOP", num_pieces):
        assert run(["###STOP"], ["before ", *pieces, " after"]) == ("before ", "###STOP")
        glued = ["before " + pieces[0], *pieces[1:]]
        glued[-1] += " after"
        assert run(["###STOP"], glued) == ("before ", "###STOP")


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["###"], ["foo###bar"], ("foo", "###")),
        (["ab", "abc"], ["xabc"], ("x", "ab")),
        (["abc", "ab"], ["xa", "bc"], ("x", "ab")),
        (["bc", "abc"], ["xab", "cd"], ("x", "abc")),  # both end here, the longer starts first
        (["bcd", "abcde"], ["abc", "de"], ("a", "bcd")),  # bcd ends first
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["\n\n"], ["one\n", "two\n\nthree"], ("one\ntwo", "\n\n")),
        (["😀"], ["hi ", "😀"], ("hi ", "😀")),
        (["END"], ["EN", "DLESS"], ("", "END")),
        (["END"], ["ENE", "N"], ("ENEN", None)),
        ([], ["anything", ""], ("anything", None)),
        (["x"], [], ("", None)),
    ],
)
def test_cases(stops: list[str], pieces: list[str], expected: tuple[str, str | None]) -> None:
    assert run(stops, pieces) == expected


@given(
    stops=st.lists(st.text("ab#", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("ab#", max_size=4), max_size=8),
)
def test_the_result_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == oracle(stops, "".join(pieces))


@given(stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), text=st.text("abc", max_size=20))
def test_only_what_may_become_a_match_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    sent = matcher.feed(text)
    if matcher.matched is None:
        held = text[len(sent) :]
        prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
        assert sent + held == text
        assert held == max((prefix for prefix in prefixes if text.endswith(prefix)), key=len)
        assert matcher.finish() == held


def test_nothing_passes_after_a_match_and_the_end_gives_nothing_twice() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("a.b") == "a"
    assert matcher.feed("c") == ""
    assert matcher.finish() == ""
    held = StopMatcher(["abc"])
    assert held.feed("ab") == ""
    assert (held.finish(), held.finish()) == ("ab", "")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])

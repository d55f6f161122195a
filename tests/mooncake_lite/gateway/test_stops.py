"""Stop strings are found however the text is cut into pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lite.gateway.stops import StopFinder

pytestmark = pytest.mark.quick


def shown(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    finder = StopFinder(stops)
    texts = [finder.push(piece) for piece in pieces]
    found = finder.found
    return "".join(texts) + finder.flush(), found


def test_text_that_only_began_like_a_stop_string_is_shown_at_last() -> None:
    finder = StopFinder(("STOP",))

    assert finder.push("one ST") == "one "
    assert finder.push("ART") == "START"
    assert finder.push("S") == ""
    assert finder.flush() == "S"
    assert not finder.found


def test_nothing_is_held_back_without_stop_strings() -> None:
    assert StopFinder(()).push("anything") == "anything"


def test_the_match_that_ends_first_wins_and_of_those_the_longest() -> None:
    assert shown(("abcd", "bc"), ["xabcd"]) == ("xa", True)
    assert shown(("bc", "abc"), ["xabc"]) == ("x", True)


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_any_cutting_shows_the_same(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]

    whole = shown(stops, [text])

    assert shown(stops, pieces) == whole
    assert shown(stops, list(text)) == whole
    assert whole[1] == any(stop in text for stop in stops)
    assert text.startswith(whole[0])
    assert not any(stop in whole[0] for stop in stops)

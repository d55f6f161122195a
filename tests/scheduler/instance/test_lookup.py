"""Prompt lookup: what followed the answer's last tokens before, and never what follows the prompt's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.instance.lookup import KEY, Lookup
from scheduler.instance.sequence import Sequence
from tests.scheduler.instance.rank import job

pytestmark = pytest.mark.quick

PROMPT = [1, 2, 3, 4, 5, 6, 7, 90, 91, 92]
"""The last three are the end of a template."""


def drafts(prompt: list[int], answer: list[int], most: int = 7, **more: object) -> tuple[list[int], bool]:
    stops = frozenset(more.pop("stops", ()))  # type: ignore[call-overload]
    lookup = Lookup(job("a", ["decode"], prompt, **more))
    found, predicted = lookup.after(Sequence([*prompt, *answer], len(answer), 99, 99, stops), most)
    return list(found), predicted


def test_what_followed_the_last_tokens_of_the_answer_is_drafted_up_to_the_end_of_the_prompt() -> None:
    assert drafts(PROMPT, [2, 3, 4]) == ([5, 6, 7, 90, 91, 92], False)
    assert drafts(PROMPT, [2, 3, 4], 2) == ([5, 6], False)


def test_of_equal_keys_the_next_one_counts_and_those_of_the_answer_follow() -> None:
    prompt = [1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3, 9, 90]
    lookup, found = Lookup(job("a", ["decode"], prompt)), []
    answer: list[int] = []
    for said in ([1, 2, 3], [7, 1, 2, 3], [8, 1, 2, 3], [70, 1, 2, 3], [71, 1, 2, 3]):
        answer += said
        found.append(lookup.after(Sequence([*prompt, *answer], len(answer), 99, 99, frozenset()), 1)[0])
    assert found == [[7], [8], [9], [7], [8]]


def test_the_end_of_the_prompt_is_no_key_when_an_answer_begins() -> None:
    """A conversation has the template's end before each earlier answer."""
    prompt = [*PROMPT, 50, 51, *PROMPT]
    assert drafts(prompt, []) == ([], False)
    assert drafts(prompt, [50]) == drafts(prompt, [50, 51]) == ([], False)
    assert drafts(prompt, [50, 51, 1]) == (PROMPT[1:8], False)


def test_what_the_answer_has_said_is_drafted_too() -> None:
    assert drafts([1], [5, 6, 7, 8, 5, 6, 7]) == ([8, 5, 6, 7], False)


def test_an_end_token_is_no_draft() -> None:
    assert drafts(PROMPT, [2, 3, 4], stops=[6]) == ([5], False)
    assert drafts(PROMPT, [2, 3, 4], stops=[5]) == ([], False)
    assert drafts(PROMPT, [30], predicted=[30, 31, 32, 33], stops=[32]) == ([31], True)
    assert drafts(PROMPT, [30, 31, 32], predicted=[30, 31, 32, 33, 34], stops=[34]) == ([33], True)


def test_a_prediction_is_drafted_from_its_beginning_and_again_after_a_difference() -> None:
    predicted = [30, 31, 32, 33, 34, 35]
    assert drafts(PROMPT, [30], predicted=predicted) == ([31, 32, 33, 34, 35], True)
    assert drafts(PROMPT, [31], predicted=predicted) == ([], False)
    assert drafts(PROMPT, [77, 31, 32, 33], 2, predicted=predicted) == ([34, 35], True)
    assert drafts(PROMPT, [2, 3, 4], predicted=predicted) == ([5, 6, 7, 90, 91, 92], False)
    assert drafts(PROMPT, [2, 3, 4], predicted=[2, 3, 4, 8]) == ([8], True)


IDS = st.sampled_from([0x0, 0x1, 0xD800, 0x10001])


def plain_search(ids: list[int], prompt: int, most: int, found: int) -> tuple[list[int], int]:
    """The drafts, and the place behind which the next search begins."""
    places = [at for at in range(len(ids) - KEY) if ids[at : at + KEY] == ids[-KEY:]]
    if len(ids) - prompt < KEY or not places:
        return [], found
    first = next((at for at in places if at >= found), places[-1]) + KEY
    end = prompt if first < prompt else len(ids)
    return ids[first : min(first + most, end)], first


@given(st.lists(IDS, min_size=1, max_size=30), st.lists(IDS, max_size=30), st.integers(1, 8))
def test_the_search_is_that_of_a_plain_loop(prompt: list[int], answer: list[int], most: int) -> None:
    lookup, place = Lookup(job("a", ["decode"], prompt)), 0
    for told in range(len(answer) + 1):
        ids = [*prompt, *answer[:told]]
        expected, place = plain_search(ids, len(prompt), most, place)
        found, predicted = lookup.after(Sequence(ids, told, 99, 99, frozenset()), most)
        assert (list(found), predicted) == (expected, False)

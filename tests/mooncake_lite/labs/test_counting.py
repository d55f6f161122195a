"""Dictionaries that count how a region uses them."""

from __future__ import annotations

import pytest

from mooncake_lite.labs.counting import CountedLookUps

pytestmark = pytest.mark.quick


def test_entries_that_are_taken_out_are_look_ups_that_can_be_told_apart() -> None:
    books = CountedLookUps({1: "a", 2: "b", 3: "c"})
    books._asked = books._written = 0
    assert (books.pop(1), books.pop(9, None), books.popitem()) == ("a", None, (3, "c"))
    with pytest.raises(KeyError):
        books.pop(9)
    assert (books._asked, books._taken, books._walked, books._written) == (4, 4, 0, 0)
    assert (books.get(2), 2 in books, list(books)) == ("b", True, [2])
    assert (books._asked, books._taken, books._walked, books._written) == (7, 4, 1, 0)

"""2d: books that are sound pass, and every way to corrupt them is noticed."""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from mooncake_lite.labs.judging import Judge


class Seen(msgspec.Struct):
    """What check() raised, whether it changed the books, and how often it compared page numbers."""

    raised: str
    changed: bool
    comparisons: int


def sound(lab: Judge, num_pages: int = 0) -> dict[str, Any]:
    """Books in which pages of every state occur."""
    num_pages = num_pages or lab.random.randint(12, 40)
    numbers = list(range(num_pages))
    lab.random.shuffle(numbers)
    third = num_pages // 3
    free, used, idle = numbers[:third], numbers[third : 2 * third], numbers[2 * third :]
    return {
        "num_pages": num_pages,
        "page_tokens": lab.size.page_tokens,
        "free": free,
        "used": [[page, lab.random.randint(1, 4)] for page in used],
        "idle": idle,
        "cached": [*idle, *used[: third // 2]],
    }


ALL_PAGES = "free, used and idle are disjoint, and together they are all pages"
"""The first sentence of the invariant."""

NEEDED = 4
"""Comparisons and hashes for each page: a set hashes a page, and then it is looked up in others."""

NONE = "no exception"


def expect_noticed(lab: Judge, given: dict[str, Any], wrong: dict[str, dict[str, Any]], rule: str) -> None:
    """Sound books must pass, and each wrong variation of them must fail with AssertionError."""
    seen = lab.ask("check", [given, *wrong.values()], list[Seen])
    lab.expect(seen[0].raised or NONE, NONE, "check() of sound books", "sound books pass")
    for what, after in zip(wrong, seen[1:]):
        lab.expect(after.raised or NONE, "AssertionError", f"check() of books in which {what}", rule)


def test_a_page_that_is_nowhere_is_noticed(lab: Judge) -> None:
    given, wrong = sound(lab), {}
    for where in ("free", "used", "idle"):
        lost = copy.deepcopy(given)
        page = lost[where].pop()
        number = page[0] if where == "used" else page
        lost["cached"] = [cached for cached in lost["cached"] if cached != number]
        wrong[f"page {number} was {where} and is nowhere now"] = lost
    expect_noticed(lab, given, wrong, ALL_PAGES)


def test_a_page_in_two_places_is_noticed(lab: Judge) -> None:
    given = sound(lab)
    idle, used, free = given["idle"][0], given["used"][-1][0], given["free"][0]
    wrong = {
        f"page {free} is free and used": {**given, "used": [*given["used"], [free, 1]]},
        f"page {used} is used and idle": {
            **given,
            "idle": [*given["idle"], used],
            "cached": [*given["cached"], used],
        },
        f"page {free} is free twice": {**given, "free": [*given["free"], free]},
        f"page {free} is free twice, and page {given['free'][-1]} is nowhere": {
            **given,
            "free": [free, *given["free"][:-1]],
        },
    }
    expect_noticed(lab, given, wrong, ALL_PAGES)
    assert idle != used


def test_a_used_page_without_a_user_is_noticed(lab: Judge) -> None:
    given = sound(lab)
    place = lab.random.randrange(len(given["used"]))
    wrong = {}
    for users in (0, -1):
        changed = copy.deepcopy(given)
        changed["used"][place][1] = users
        wrong[f"page {changed['used'][place][0]} is used by {users} sequences"] = changed
    expect_noticed(lab, given, wrong, "used counts the sequences that use a page, at least 1")


def test_a_cached_page_that_is_free_is_noticed(lab: Judge) -> None:
    given = sound(lab)
    free = lab.random.choice(given["free"])
    wrong = {f"page {free} is free and cached": {**given, "cached": [*given["cached"], free]}}
    expect_noticed(lab, given, wrong, "a cached page is not free")


def test_an_idle_page_that_is_not_cached_is_noticed(lab: Judge) -> None:
    given = sound(lab)
    idle = lab.random.choice(given["idle"])
    cached = [page for page in given["cached"] if page != idle]
    wrong = {f"page {idle} is idle and not cached": {**given, "cached": cached}}
    expect_noticed(lab, given, wrong, "an idle page is cached")


def test_a_page_that_does_not_exist_is_noticed(lab: Judge) -> None:
    given = sound(lab)
    wrong = {}
    for number in (-1, given["num_pages"]):
        changed = copy.deepcopy(given)
        changed["free"][0] = number
        wrong[f"page {number} is free, of {given['num_pages']} pages"] = changed
    expect_noticed(lab, given, wrong, f"{ALL_PAGES}, numbered from 0")


def test_sound_books_pass_and_stay_as_they_are(lab: Judge) -> None:
    given = [sound(lab) for _ in range(12)]
    empty = {"num_pages": 3, "page_tokens": 4, "free": [2, 1, 0], "used": [], "idle": [], "cached": []}
    full = {**empty, "free": [], "used": [[1, 2], [0, 1], [2, 5]]}
    lost = {**empty, "free": [2, 1]}
    seen = lab.ask("check", [*given, empty, full, lost], list[Seen])
    lab.expect(
        [(after.raised or NONE, after.changed) for after in seen],
        [(NONE, False)] * 14 + [("AssertionError", False)],
        "check() of 14 sound books and one with a lost page (exception, books changed)",
        "check() asserts, and changes nothing",
    )


def test_a_check_is_cheap(lab: Judge) -> None:
    given = sound(lab, num_pages=2000)
    wrong = {**given, "free": given["free"][1:]}
    seen = lab.ask("check", [given, wrong], list[Seen])
    lab.cost(seen[0].comparisons, 40 * 2000, needed=NEEDED * 2000)
    lab.expect(
        [after.raised or NONE for after in seen],
        [NONE, "AssertionError"],
        "check() of 2,000 pages, sound and with a lost page (exception)",
        "large books are checked like small ones",
    )

"""Prefix sharing, as every form of it does it."""

from __future__ import annotations

import copy

import pytest

from scheduler.instance.pages import PageDraft, Pages
from scheduler.instance.prefix import Chain, PrefixCache
from tests.python import printed_by
from tests.scheduler.instance.prefix_books import FORMS, Books

pytestmark = pytest.mark.quick

PROMPT = list(range(10, 22))
"""Twelve tokens: six pages, three blocks of two pages."""


@pytest.fixture(params=FORMS)
def books(request: pytest.FixtureRequest) -> Books:
    """The sequences of a rank of 12 pages, for each form of the cache."""
    form, unit = FORMS[request.param]
    return Books(form, unit)


def served(books: Books, name: str, prompt: list[int], salt: bytes | None = b"s") -> int | None:
    """Start a sequence and compute its prompt; the number of tokens that it shared."""
    shared = books.start(name, prompt, salt)
    if shared is not None:
        books.compute(name, len(prompt))
    return shared


def test_a_sequence_shares_what_an_earlier_one_has_left(books: Books) -> None:
    served(books, "a", PROMPT)
    books.finish("a")
    assert served(books, "b", [*PROMPT, 1]) == 12


def test_a_sequence_shares_what_a_running_one_has_computed_so_far(books: Books) -> None:
    books.start("a", PROMPT)
    books.compute("a", 9)
    assert served(books, "b", PROMPT) == 8
    assert books.seqs["a"].pages[:4] == books.seqs["b"].pages[:4]


def test_the_last_token_of_a_prompt_is_always_computed(books: Books) -> None:
    served(books, "a", PROMPT)
    books.finish("a")
    assert served(books, "b", PROMPT) == 12 - books.unit


def test_tokens_of_an_answer_are_shared_like_tokens_of_a_prompt(books: Books) -> None:
    served(books, "a", PROMPT)
    for token in range(4):
        books.decode("a", token)
    books.finish("a")
    assert served(books, "b", [*PROMPT, 0, 1, 2, 3, 4]) == 16


def test_sequences_that_part_share_the_units_before_that_token(books: Books) -> None:
    served(books, "a", PROMPT)
    assert served(books, "b", [*PROMPT[:9], 1, 1, 1]) == 8
    assert served(books, "c", [*PROMPT[:9], 1, 1, 2]) == (10 if books.unit == 2 else 8)


def test_two_sequences_that_computed_the_same_tokens_use_the_same_pages_afterwards(books: Books) -> None:
    assert books.start("a", PROMPT) == books.start("b", PROMPT) == 0
    assert len(books.pages.free) == 0
    books.compute("a", 12)
    books.compute("b", 12)
    assert books.seqs["a"].pages == books.seqs["b"].pages
    assert len(books.pages.free) == 6


def test_the_continuation_of_a_prefix_that_another_sequence_computed_first_is_shared_too(
    books: Books,
) -> None:
    books.start("a", PROMPT[:8])
    books.start("b", PROMPT)
    books.compute("a", 8)
    books.compute("b", 12)
    books.finish("a")
    books.finish("b")
    assert served(books, "c", [*PROMPT, 1]) == 12


def test_a_salt_shares_only_with_itself_and_a_sequence_without_one_with_nobody(books: Books) -> None:
    served(books, "a", PROMPT[:5], b"s")
    books.finish("a")
    for salt, shared in ((b"t", 0), (None, 0), (b"s", 4), (None, 0), (b"t", 4)):
        assert served(books, "b", PROMPT[:5], salt) == shared
        books.finish("b")


def test_eviction_shortens_the_prefix_that_was_left_longest_ago_from_its_end(books: Books) -> None:
    served(books, "a", PROMPT)
    served(books, "b", [7] * 8)
    books.finish("a")
    books.finish("b")
    assert served(books, "other", [8] * 12) == 0  # 2 pages are free, 4 are evicted
    assert books.prefix.match(books.chain(PROMPT), PROMPT, 12) == books.naive_match(PROMPT)
    assert len(books.prefix.match(books.chain(PROMPT), PROMPT, 12)) == 2
    assert len(books.prefix.match(books.chain([7] * 8), [7] * 8, 8)) == 4


def test_a_prefix_that_is_used_again_is_evicted_after_the_others(books: Books) -> None:
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        served(books, name, [token] * 8)
        books.finish(name)
    served(books, "a", [1] * 9)  # needs a page: of "b"
    books.finish("a")
    assert served(books, "d", [4] * 8) == 0
    lengths = [len(books.prefix.match(books.chain([token] * 8), [token] * 8, 8)) for token in (1, 2, 3)]
    assert lengths == [4, 0, 4] if books.unit == 4 else [4, 0, 3]


def test_a_page_in_use_is_never_evicted(books: Books) -> None:
    served(books, "a", PROMPT)
    served(books, "b", [*PROMPT[:8], 1, 1, 1, 1])
    assert books.start("c", [9] * 12) is None
    books.finish("b")
    assert books.start("c", [9] * 12) == 0
    assert books.start("d", [9]) is None


def test_a_branch_copies_the_page_that_it_writes_to_and_shares_the_others(books: Books) -> None:
    served(books, "a", PROMPT[:9])
    books.fork("a", "b")
    books.decode("a", 1)
    books.decode("b", 2)
    one, two = books.seqs["a"], books.seqs["b"]
    assert one.pages[:4] == two.pages[:4]
    assert one.pages[4] != two.pages[4]
    books.finish("a")
    books.decode("b", 3)
    assert len(books.pages.held) == 6


def test_equal_answers_of_two_branches_share_their_pages_again(books: Books) -> None:
    served(books, "a", PROMPT[:9])
    books.fork("a", "b")
    for token in (1, 2, 3):
        books.decode("a", token)
        books.decode("b", token)
    assert books.seqs["a"].pages == books.seqs["b"].pages
    assert len(books.pages.held) == 6


def test_a_cache_that_is_cleared_matches_nothing_and_disturbs_no_sequence(books: Books) -> None:
    served(books, "a", PROMPT[:8])
    books.finish("a")
    served(books, "b", [1] * 8)
    books.clear()
    assert len(books.pages.free) == 8
    assert served(books, "c", PROMPT[:9]) == 0
    books.decode("b", 1)
    books.finish("b")
    assert served(books, "d", [1] * 9) == 8


def test_a_copy_is_equal_and_goes_its_own_way(books: Books) -> None:
    served(books, "a", PROMPT)
    twin = copy.deepcopy(books)
    assert (twin.pages, twin.prefix) == (books.pages, books.prefix)
    twin.finish("a")
    served(twin, "b", [1] * 6)
    assert twin.prefix != books.prefix
    twin.check()
    books.check()


SCENE = """
from tests.scheduler.instance.prefix_books import FORMS, Books
for form, unit in FORMS.values():
    books = Books(form, unit)
    for n in range(30):
        tokens = [n % 3, n % 2, 1, 1, n % 5, 1, n % 7, 1, 1]
        if books.start(str(n), tokens) is not None:
            books.compute(str(n), 9)
        if n > 1:
            books.seqs.get(str(n - 2)) and books.finish(str(n - 2))
        print(list(books.pages.free), books.pages.used, list(books.pages.idle))
"""


def test_the_choice_of_pages_depends_on_no_random_hash() -> None:
    said = {printed_by("-c", SCENE, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert len(said) == 1
    assert said.pop().count("\n") == 90


def test_the_form_that_shares_nothing_leaves_pages_alone() -> None:
    pages, prefix = Pages(4, 2), PrefixCache()
    pages.take([0, 1])
    mine = [0, 1]
    prefix.insert(Chain(b"s"), PROMPT, mine, 4)
    pages.give_back(mine)
    assert prefix.match(Chain(b"s"), PROMPT, 4) == ()
    assert list(prefix.victims()) == []
    assert prefix.drain() == ([], [])
    prefix.drop(PageDraft(pages, prefix).evicted)
    prefix.clear()
    prefix.check()
    assert len(pages.free) == 4

"""Pages: users are counted, what is cached outlives its users, and a draft changes nothing."""

from __future__ import annotations

import copy

import pytest

from scheduler.instance.pages import PageDraft, Pages
from scheduler.instance.prefix_radix import RadixPrefix
from tests.scheduler.instance.prefix_books import PAGE, computed

pytestmark = pytest.mark.quick


def idle_prefixes(num_pages: int, *lengths: int) -> tuple[Pages, RadixPrefix]:
    """A cache of idle prefixes of so many pages each: 0 .. a-1, a .. b-1 and so on, the first left first."""
    pages = Pages(num_pages, PAGE)
    prefix = RadixPrefix(pages, PAGE)
    for number, length in enumerate(lengths):
        pages.give_back(computed(prefix, [number] * length * PAGE))
    return pages, prefix


def test_a_shared_page_is_free_only_after_its_last_user_has_left() -> None:
    pages = Pages(4, PAGE)
    pages.take([0, 1])
    pages.share([0])
    assert pages.used == {0: 2, 1: 1}
    pages.give_back([0, 1])
    assert (set(pages.held), len(pages.free)) == ({0}, 3)
    pages.give_back([0])
    assert (set(pages.held), len(pages.free)) == (set(), 4)
    pages.check()


def test_a_cached_page_becomes_idle_when_its_last_user_leaves_and_can_be_shared_again() -> None:
    pages = Pages(4, PAGE)
    pages.take([0, 1])
    pages.cache([0])
    pages.give_back([0, 1])
    assert (list(pages.idle), len(pages.idle), len(pages.free)) == ([0], 1, 3)
    pages.share([0])
    assert pages.used == {0: 1}
    assert len(pages.idle) == 0
    pages.check()


def test_a_sequence_gives_back_its_last_page_first() -> None:
    pages = Pages(4, PAGE)
    pages.take([0, 1, 2])
    pages.cache([0, 1, 2])
    pages.give_back([0, 1, 2])
    assert list(pages.idle) == [2, 1, 0]


def test_an_idle_page_that_leaves_the_cache_is_free_and_a_used_one_stays_with_its_users() -> None:
    pages = Pages(4, PAGE)
    pages.take([0, 1])
    pages.cache([0, 1])
    pages.give_back([1])
    pages.uncache([0, 1])
    pages.check()
    assert (pages.used, list(pages.free)) == ({0: 1}, [1, 3, 2])
    pages.give_back([0])
    assert list(pages.free) == [1, 3, 2, 0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda pages: pages.take([2]), "page 2 is not the next free page"),
        (lambda pages: pages.share([3]), "page 3 is shared but is free"),
        (lambda pages: pages.give_back([3]), "page 3 is given back but was not taken"),
        (lambda pages: pages.cache([3]), "page 3 is cached but nothing was written to it"),
        (lambda pages: pages.cache([0, 0]), "page 0 is cached twice"),
    ],
)
def test_a_call_that_would_corrupt_the_counts_is_refused_by_name(wrong: object, says: str) -> None:
    pages = Pages(4, PAGE)
    pages.take([0])
    with pytest.raises(AssertionError, match=says):
        wrong(pages)  # type: ignore[operator]


def test_a_draft_takes_free_pages_first_and_then_evicts_what_was_left_longest_ago() -> None:
    pages, prefix = idle_prefixes(6, 2, 2)
    before = copy.deepcopy((pages, prefix))
    draft = PageDraft(pages, prefix)
    assert draft.num_available == 6
    assert (draft.take(1), draft.evicted) == ((4,), ())
    assert (draft.take(3), draft.evicted) == ((5, 1, 0), (1, 0))
    assert draft.num_available == 2
    assert draft.take(3) is None
    assert (draft.take(2), draft.evicted) == ((3, 2), (1, 0, 3, 2))
    assert (pages, prefix) == before


def test_what_a_draft_chose_can_be_carried_out_in_its_order() -> None:
    pages, prefix = idle_prefixes(6, 2, 2)
    draft = PageDraft(pages, prefix)
    first, second = draft.take(3), draft.take(2)
    assert first is not None
    assert second is not None
    prefix.drop(draft.evicted)
    pages.take(first)
    pages.take(second)
    pages.check()
    prefix.check()
    assert set(pages.held) == {*first, *second}


def test_a_draft_keeps_the_pages_of_a_match_and_evicts_others_in_their_place() -> None:
    pages, prefix = idle_prefixes(4, 2, 2)
    draft = PageDraft(pages, prefix)
    assert draft.keep_and_take((0,), 1) == ((0,), ())
    assert draft.num_available == 3
    assert (draft.take(3), draft.evicted) == ((1, 3, 2), (1, 3, 2))
    assert draft.take(1) is None


def test_a_page_is_kept_once_although_two_sequences_of_a_step_share_it() -> None:
    pages, prefix = idle_prefixes(4, 2)
    draft = PageDraft(pages, prefix)
    for _ in range(2):
        assert draft.keep_and_take((0, 1), 2) == ((0, 1), ())
    assert draft.num_available == 2


def test_of_a_match_only_the_part_is_kept_that_the_same_draft_has_not_evicted() -> None:
    pages, prefix = idle_prefixes(4, 4)
    draft = PageDraft(pages, prefix)
    assert draft.take(2) == (3, 2)
    assert draft.keep_and_take((0, 1, 2, 3), 2) == ((0, 1), ())
    assert draft.num_available == 0


def test_a_sequence_that_gets_too_few_pages_keeps_none_from_the_others() -> None:
    pages, prefix = idle_prefixes(4, 2)
    draft = PageDraft(pages, prefix)
    assert draft.keep_and_take((0, 1), 5) is None
    assert draft.num_available == 4
    assert draft.keep_and_take((0, 1), 4) == ((0, 1), (2, 3))
    assert (draft.num_available, draft.evicted) == (0, ())

"""Prefix sharing by hash: what keys mean, and what happens when they lie."""

from __future__ import annotations

import pytest

from scheduler.instance.pages import PageDraft, Pages
from scheduler.instance.prefix import Chain
from scheduler.instance.prefix_hash import HashPrefix
from tests.scheduler.instance.prefix_books import PAGE, Books, chain_of, computed, hash_of_blocks, keys_of

pytestmark = pytest.mark.quick

PROMPT = list(range(10, 22))


def test_a_block_is_stored_under_the_key_that_the_request_brought() -> None:
    prefix = HashPrefix(Pages(8, PAGE), 4)
    pages = computed(prefix, PROMPT[:8], Chain(b"s", [71, 72]))
    assert prefix.drain() == ([71, 72], [])
    assert prefix.match(Chain(b"s", [71, 72]), PROMPT[:8], 8) == tuple(pages)


def test_a_key_that_belongs_to_other_tokens_is_no_hit_and_its_block_stays() -> None:
    prefix = HashPrefix(Pages(12, PAGE), 4)
    first = computed(prefix, PROMPT[:8], Chain(b"s", [71, 72]))
    forged = Chain(b"s", [71, 72])
    assert prefix.match(forged, [1] * 8, 8) == ()
    computed(prefix, [1] * 8, forged)
    assert prefix.match(Chain(b"s", [71, 72]), PROMPT[:8], 8) == tuple(first)
    assert prefix.match(forged, [1] * 8, 8) == ()


def test_equal_tokens_and_an_equal_key_after_another_prefix_are_no_hit() -> None:
    prefix = HashPrefix(Pages(12, PAGE), 4)
    computed(prefix, [1, 1, 1, 1, 2, 2, 2, 2], Chain(b"s", [71, 72]))
    second = computed(prefix, [3, 3, 3, 3, 2, 2, 2, 2], Chain(b"s", [81, 72]))
    assert prefix.match(Chain(b"s", [81, 72]), [3, 3, 3, 3, 2, 2, 2, 2], 8) == tuple(second[:2])


def test_an_equal_first_key_of_another_salt_is_no_hit() -> None:
    prefix = HashPrefix(Pages(12, PAGE), 4)
    computed(prefix, PROMPT[:4], Chain(b"s", [71]))
    assert prefix.match(Chain(b"t", [71]), PROMPT[:4], 4) == ()


def test_a_block_that_branches_share_in_part_comes_in_when_one_branch_is_left() -> None:
    books = Books(hash_of_blocks, 4)
    books.start("a", PROMPT[:6])
    books.compute("a", 6)
    books.fork("a", "b")
    for token in (1, 2):
        books.decode("a", token)
        books.decode("b", token + 5)
    one, two = books.seqs["a"].pages, books.seqs["b"].pages
    assert one[2] == two[2]  # a full page of a block that is not full
    assert books.pages.cached.keys() == set(one[:2])
    books.finish("b")
    for token in (3, 4, 5, 6):
        books.decode("a", token)
    assert books.pages.cached.keys() == set(books.seqs["a"].pages)


def test_a_block_is_evicted_as_a_whole() -> None:
    prefix = HashPrefix(Pages(6, PAGE), 4)
    pages = computed(prefix, PROMPT, chain_of(PROMPT))
    prefix.pages.give_back(pages)
    draft = PageDraft(prefix.pages, prefix)
    assert draft.take(1) == (pages[4],)
    assert draft.evicted == (pages[4], pages[5])
    prefix.drop(draft.evicted)
    prefix.check()
    assert len(prefix.pages.free) == 2
    with pytest.raises(AssertionError, match="a part of a block is dropped"):
        prefix.drop(pages[2:3])


def test_keys_are_told_once_and_not_at_all_when_the_block_came_and_went() -> None:
    prefix = HashPrefix(Pages(6, PAGE), 4)
    pages = computed(prefix, PROMPT, chain_of(PROMPT))
    keys = keys_of(b"s", PROMPT, 4)
    prefix.pages.give_back(pages)
    prefix.drop(pages[4:])
    assert prefix.drain() == (keys[:2], [])
    assert prefix.drain() == ([], [])
    prefix.drop(pages[2:4])
    prefix.clear()
    assert prefix.drain() == ([], [keys[1], keys[0]])
    computed(prefix, PROMPT[:4], chain_of(PROMPT[:4]))
    assert prefix.drain() == (keys[:1], [])
    prefix.clear()
    computed(prefix, PROMPT[:4], chain_of(PROMPT[:4]))
    assert prefix.drain() == ([], [])


def test_a_block_has_whole_pages() -> None:
    with pytest.raises(AssertionError, match="not a whole number of pages"):
        HashPrefix(Pages(6, 4), 6)

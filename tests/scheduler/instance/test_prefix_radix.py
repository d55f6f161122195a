"""Prefix sharing by radix tree: the shape of the tree."""

from __future__ import annotations

import pytest

from scheduler.instance.pages import PageDraft, Pages
from scheduler.instance.prefix import Chain
from scheduler.instance.prefix_radix import Node, RadixPrefix
from tests.scheduler.instance.prefix_books import PAGE, S, computed, keys_of

pytestmark = pytest.mark.quick


def drawn(node: Node, indent: str = "") -> list[str]:
    """The runs below a node, one per line."""
    lines = []
    for child in node.children.values():
        lines.append(f"{indent}{' '.join(map(str, child.tokens))} in {child.pages}")
        lines += drawn(child, indent + "  ")
    return lines


def tree(prefix: RadixPrefix, salt: bytes = b"s") -> list[str]:
    prefix.check()
    return drawn(prefix._roots[salt]) if salt in prefix._roots else []


def test_a_run_is_split_between_pages_where_two_sequences_part() -> None:
    prefix = RadixPrefix(Pages(8, PAGE), PAGE)
    computed(prefix, [1, 2, 3, 4, 5, 6])
    computed(prefix, [1, 2, 3, 9, 5, 6])  # parts within the second page
    assert tree(prefix) == ["(1, 2) in [0]", "  (3, 4) (5, 6) in [1, 2]", "  (3, 9) (5, 6) in [3, 4]"]
    computed(prefix, [1, 2, 3, 4, 7, 7])
    assert tree(prefix) == [
        "(1, 2) in [0]",
        "  (3, 4) in [1]",
        "    (5, 6) in [2]",
        "    (7, 7) in [5]",
        "  (3, 9) (5, 6) in [3, 4]",
    ]


def test_a_sequence_is_one_run_that_grows_with_it() -> None:
    prefix = RadixPrefix(Pages(8, PAGE), PAGE)
    tokens = [1, 2, 3, 4, 5]
    pages = computed(prefix, tokens)
    assert tree(prefix) == ["(1, 2) (3, 4) in [0, 1]"]
    for token in (6, 7, 8):
        tokens.append(token)
        if len(tokens) % PAGE == 1:
            new = PageDraft(prefix.pages, prefix).take(1)
            assert new is not None
            prefix.pages.take(new)
            pages += new
        prefix.insert(S, tokens, pages, len(tokens))
    assert tree(prefix) == ["(1, 2) (3, 4) (5, 6) (7, 8) in [0, 1, 2, 3]"]


def test_a_sequence_that_is_the_beginning_of_another_adds_nothing() -> None:
    prefix = RadixPrefix(Pages(8, PAGE), PAGE)
    computed(prefix, [1, 2, 3, 4, 5, 6])
    pages = computed(prefix, [1, 2, 3, 4])
    assert pages == [0, 1]
    assert tree(prefix) == ["(1, 2) (3, 4) (5, 6) in [0, 1, 2]"]


def test_two_salts_have_two_trees_and_an_empty_tree_is_forgotten() -> None:
    prefix = RadixPrefix(Pages(8, PAGE), PAGE)
    one = computed(prefix, [1, 2])
    two = computed(prefix, [1, 2], Chain(b"t"))
    assert tree(prefix) == ["(1, 2) in [0]"]
    assert tree(prefix, b"t") == ["(1, 2) in [1]"]
    prefix.pages.give_back(one)
    prefix.pages.give_back(two)
    prefix.drop(one)
    assert prefix._roots.keys() == {b"t"}


def test_eviction_takes_single_pages_from_the_end_of_a_leaf() -> None:
    prefix = RadixPrefix(Pages(6, PAGE), PAGE)
    first = computed(prefix, [1, 2, 3, 4, 5, 6])
    second = computed(prefix, [1, 2, 9, 9, 8, 8])
    prefix.pages.give_back(first)
    prefix.pages.give_back(second)
    assert [page for (page,) in prefix.victims()] == [2, 1, 4, 3, 0]
    prefix.drop([2])
    assert tree(prefix) == ["(1, 2) in [0]", "  (3, 4) in [1]", "  (9, 9) (8, 8) in [3, 4]"]
    prefix.drop([1])
    assert tree(prefix) == ["(1, 2) in [0]", "  (9, 9) (8, 8) in [3, 4]"]
    prefix.drop([4, 3, 0])
    assert tree(prefix) == []


def test_a_page_in_the_middle_is_never_evicted() -> None:
    prefix = RadixPrefix(Pages(6, PAGE), PAGE)
    pages = computed(prefix, [1, 2, 3, 4])
    computed(prefix, [1, 2, 9, 9])
    prefix.pages.give_back(pages)
    assert [page for (page,) in prefix.victims()] == [1]
    with pytest.raises(AssertionError, match="page 0 is dropped before the pages that follow it"):
        prefix.drop([0])


def test_a_page_in_the_middle_of_a_run_is_never_evicted() -> None:
    prefix = RadixPrefix(Pages(6, PAGE), PAGE)
    pages = computed(prefix, [1, 2, 3, 4])
    prefix.pages.give_back(pages)
    with pytest.raises(AssertionError, match="page 0 is dropped from the middle of a run"):
        prefix.drop([0])


def test_the_keys_of_whole_blocks_are_told_when_their_last_page_comes_in_and_goes_out() -> None:
    prefix = RadixPrefix(Pages(8, PAGE), 2 * PAGE)
    ids = list(range(2 * 2 * PAGE + PAGE))  # two blocks and a page
    keys = keys_of(b"s", ids, 2 * PAGE)
    head = computed(prefix, ids[: 3 * PAGE], Chain(b"s", keys[:1]))
    assert prefix.drain() == (keys[:1], [])
    pages = computed(prefix, ids, Chain(b"s", keys))
    assert pages[:3] == head
    assert prefix.drain() == (keys[1:], [])
    prefix.pages.give_back(head)
    prefix.pages.give_back(pages)
    prefix.drop([pages[4], pages[3]])
    prefix.check()
    assert prefix.drain() == ([], keys[1:])
    prefix.clear()
    assert prefix.drain() == ([], keys[:1])

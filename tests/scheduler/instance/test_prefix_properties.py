"""Prefix sharing under any legal sequence of calls: all forms beside a naive twin, and beside each other."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.conftest import examples
from tests.scheduler.instance.prefix_books import FORMS, PAGE, Books, hash_of_pages

pytestmark = pytest.mark.quick

SETTINGS = settings(max_examples=examples(30), stateful_step_count=40)

STEM = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0]

prompts = st.builds(
    lambda cut, tail: [*STEM[:cut], *tail],
    st.sampled_from([4, 6, 7, 8, 9, 12, 2]),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
"""Most prompts begin with the same tokens."""
salts = st.sampled_from([b"s"] * 8 + [b"t", None])
which = st.integers(0, 5)


class AnySharing(RuleBasedStateMachine):
    """Sequences that start, compute, decode, fork and end, in every form of the cache at once."""

    def __init__(self) -> None:
        super().__init__()
        self.forms = {name: Books(form, unit) for name, (form, unit) in FORMS.items()}
        self.forms["collisions"] = Books(hash_of_pages, PAGE, collide=True)
        self.made = 0

    def having(self, number: int) -> list[tuple[Books, str]]:
        """(form, name) of a sequence in all the forms that have it."""
        names = sorted({name for books in self.forms.values() for name in books.seqs})
        if not names:
            return []
        name = names[number % len(names)]
        return [(books, name) for books in self.forms.values() if name in books.seqs]

    @rule(prompt=prompts, salt=salts, at_once=st.booleans())
    def start(self, prompt: list[int], salt: bytes | None, at_once: bool) -> None:
        self.made += 1
        for books in self.forms.values():
            if books.start(f"s{self.made}", prompt, salt) is not None:
                books.compute(f"s{self.made}", 12 if at_once else 0)

    @rule(number=which, count=st.sampled_from([16, 5, 1]))
    def compute(self, number: int, count: int) -> None:
        for books, name in self.having(number):
            books.compute(name, count)

    @rule(number=which, token=st.integers(0, 1))
    def decode(self, number: int, token: int) -> None:
        for books, name in self.having(number):
            books.decode(name, token)

    @rule(number=which)
    def fork(self, number: int) -> None:
        self.made += 1
        for books, name in self.having(number):
            books.fork(name, f"s{self.made}")

    @rule(number=which)
    def finish(self, number: int) -> None:
        for books, name in self.having(number):
            books.finish(name)

    @rule(chance=st.sampled_from([False] * 9 + [True]))
    def clear(self, chance: bool) -> None:
        for books in self.forms.values() if chance else ():
            books.clear()

    @invariant()
    def hash_and_tree_with_equal_units_do_exactly_the_same(self) -> None:
        assert self.forms["hash"].pages == self.forms["radix"].pages
        assert self.forms["hash"].seqs == self.forms["radix"].seqs
        assert self.forms["hash"].prefix.drain() == self.forms["radix"].prefix.drain()

    def teardown(self) -> None:
        for books in self.forms.values():
            for name in list(books.seqs):
                books.finish(name)
            assert len(books.pages.free) + len(books.pages.idle) == books.pages.num_pages
            books.clear()
            assert len(books.pages.free) == books.pages.num_pages


TestAnySharing = AnySharing.TestCase
TestAnySharing.settings = SETTINGS

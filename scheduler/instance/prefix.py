"""The prefix cache of one rank: the contract of all forms, and the form that shares nothing.

A prefix cache remembers which pages hold the KV of which leading tokens, so that a new sequence can use these
pages and compute only the rest. Called by the planner and by `pages.PageDraft`. It moves no byte. The forms
are prefix_hash.py (whole blocks by key) and prefix_radix.py (pages by token ids). Explained in
docs/explain/prefix-sharing.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Chain:
    """The facts about a sequence that a prefix cache needs besides tokens. Branches of a request share them.

    salt   separates sequences whose KV differs although their tokens are equal; None: share nothing
    keys   the pool's key of each full block that is matched or inserted
    """

    salt: bytes | None = None
    keys: Sequence[int] = ()


SLICE_UNITS = 64
"""Units that are copied from a sequence at once, so that a caller that stops early has copied few in vain."""


def units_of(token_ids: Sequence[int], size: int, begin: int, end: int) -> Iterator[tuple[int, ...]]:
    """Yield the token ids of the units begin .. end-1, each of `size` tokens. Only full units are yielded."""
    for first in range(begin, end, SLICE_UNITS):
        tokens = iter(token_ids[first * size : min(first + SLICE_UNITS, end) * size])
        yield from zip(*[tokens] * size)


@dataclass(slots=True)
class PrefixCache:
    """Maps leading tokens to pages that hold them. It consists of units, runs of pages that are shared whole.

    This form shares nothing: every sequence computes all of its tokens. The others extend it.

    unit_tokens   tokens of a unit; `insert` changes nothing until a sequence has filled another one
    _came_in      key of a block that came in or went out since the last `drain` -> which of the two

    Invariants, which the callers and all forms keep:

    - A unit is full: all of its tokens are computed, and nothing writes into its pages any more.
    - A sequence that uses a unit also uses the units of all tokens before it.

    A unit that is idle therefore has no unit with users after it, and it became idle after all units that
    follow it. So the order of `Pages.idle` evicts the end of a prefix before its beginning.
    """

    _came_in: dict[int, bool] = field(init=False, default_factory=dict)

    @property
    def unit_tokens(self) -> int:
        """Return the tokens of a unit. Without units: more than any sequence has."""
        return 1 << 60

    def match(
        self, chain: Chain, token_ids: Sequence[int], most_tokens: int, known: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return the pages of the longest leading run of units, of at most most_tokens tokens.

        known   pages of an earlier match of these tokens that are still cached: it continues after them

        Changes nothing. The caller passes at most len(token_ids) - 1: the last token of a sequence is always
        computed, because its logits choose the next one.
        """
        return ()

    def insert(self, chain: Chain, token_ids: Sequence[int], pages: list[int], num_tokens: int) -> None:
        """Note that the first num_tokens tokens are computed and lie in these pages of a sequence.

        Where a unit with the same tokens is in the cache already, its pages replace the sequence's own, in
        `pages` and in the counts. Costs as much as the units that the sequence has filled since its last
        insert. No step that names the sequence's pages may be under way.
        """

    def victims(self) -> Iterator[tuple[int, ...]]:
        """Yield the idle units in the order of their eviction, one at a time."""
        return iter(())

    def drop(self, pages: Sequence[int]) -> None:
        """Evict units: exactly the pages that `victims` named, in its order."""
        assert not pages, f"pages {pages} are dropped from a cache that is always empty"

    def clear(self) -> None:
        """Forget everything. Pages in use stay with their sequences."""

    def drain(self) -> tuple[list[int], list[int]]:
        """Return the keys of the blocks that (came in, went out) since the last call. No key is in both."""
        changed, self._came_in = self._came_in, {}
        came_in = [key for key, came in changed.items() if came]
        return came_in, [key for key, came in changed.items() if not came]

    def _note(self, key: int, *, came_in: bool) -> None:
        """Note a change. Coming in and going out cancel each other."""
        if key in self._came_in:
            del self._came_in[key]
        else:
            self._came_in[key] = came_in

    def held(self) -> list[int]:
        """Return the keys of all blocks, for a listener that knows none, and drain."""
        return []

    def check(self) -> None:
        """Assert the invariants."""

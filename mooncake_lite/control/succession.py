"""What a conductor does that takes over from an earlier one: it learns what ranks hold before it begins.

Used by `machine.py`. Ranks drop their work and list their blocks, gateways send their open requests again.
Nothing of the earlier conductor's own state is needed. See docs/explain/failures.md.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake_lite.control.books import Books
from mooncake_lite.control.dispatch import Dispatcher
from mooncake_lite.control.events import Inventory
from mooncake_lite.control.grants import NOBODY, UNKNOWN_S, Grant
from mooncake_lite.control.pool import Pool
from store.books.quarantine import QUARANTINE_S
from store.objects import HeldBlock

EndRank = Callable[[int, str, float], None]


class Succession:
    """The time until every rank that lives has reported. Nothing is allocated or read until then.

    is_over   all have, or there was no earlier conductor
    _grant    its time limit
    """

    def __init__(self, books: Books, pool: Pool, dispatcher: Dispatcher, end_rank: EndRank) -> None:
        self._directory, self._members, self._grants = books.directory, books.members, books.grants
        self._pool, self._dispatcher, self._end_rank = pool, dispatcher, end_rank
        self._blocks: list[HeldBlock] = []
        self._grant = 0
        self.is_over = not books.config.term
        if not self.is_over:
            dispatcher.learning = "a new conductor does not know yet what ranks hold; try again"

    def on_inventory(self, inventory: Inventory) -> None:
        """Keep what a store rank holds until all have reported."""
        self._blocks += () if self.is_over else inventory.blocks

    def look(self, now: float) -> None:
        """Begin once every rank that lives has reported. Ranks that never do are killed."""
        if self.is_over:
            return
        if not self._grant:
            self._grant = self._grants.open(NOBODY, None, self._overdue, now, lasts_s=UNKNOWN_S).number
        if self._members.missing():
            return
        self.is_over = True
        self._grants.close(self._grant)
        keyed = self._dispatcher.room.keyed
        wanted = [keyed(b.key, b.digest, b.parent, b.position, b.class_id) for b in self._blocks]
        self._directory.adopt(list(zip(self._blocks, wanted)), now, QUARANTINE_S)
        self._blocks.clear()
        self._pool.order_saves(now)
        self._dispatcher.open(now)

    def _overdue(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        for rank in self._members.missing():
            self._end_rank(rank, "did not report to a new conductor", now)

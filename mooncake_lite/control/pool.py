"""Publication of blocks: they become visible in the pool, are saved to SSD, or leave a tier.

Used by `machine.py` and its parts; drives the store's directory.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter

from mooncake_lite.control.books import Books
from mooncake_lite.control.effects import HoldBlocks, SaveBlocks
from mooncake_lite.control.events import BlocksSaved
from mooncake_lite.control.grants import Grant
from store.books.ledger import Event, visible_copies
from store.objects import BlockStored, HeldBlock, Tier

_PLACE = attrgetter("__class__", "rank", "tier")


class Pool:
    """Publishes objects, applies reports of tiers, and feeds the scheduler's index.

    _saving   (rank, key) -> the grant of its save, which is about the keys that are not in a sealed file
    """

    def __init__(self, books: Books) -> None:
        self._directory, self._index = books.directory, books.state.index
        self._grants, self._emit, self._members = books.grants, books.emit, books.members
        self._is_held = books.config.survives and books.config.has_pool
        self._saving: dict[tuple[int, int], Grant] = {}

    def publish(self, object_ids: list[int], checksums: list[list[int]], now: float) -> None:
        """Make written objects visible, unless they are, and order saves of those that a tier keeps."""
        ended = zip(object_ids, checksums, strict=True)
        there = [(number, sums) for number, sums in ended if self._directory.is_writing(number)]
        self._directory.put_end_many([number for number, _ in there], [sums for _, sums in there], now)
        self.order_saves(now)

    def order_saves(self, now: float) -> None:
        """Have tiers save what has become visible."""
        for rank, places in self._directory.take_saves().items():
            refs = [place.ref for place in places]
            keys = [place.key or 0 for place in places]
            sums = [list(place.checksums) for place in places]
            grant = self._grants.open(rank, set(keys), self._save_lost, now)
            self._saving.update(((rank, key), grant) for key in keys)
            self._emit(SaveBlocks(rank, refs, keys, [place.digest for place in places], sums))

    def tell(self) -> None:
        """Update the index, and emit every BlockStored and BlockRemoved since the last call."""
        events = self._directory.drain_events()
        if not events:
            return
        for (kind, rank, tier), group in groupby(events, _PLACE):
            keys = [event.key for event in group]
            keys.reverse()  # the directory stores and evicts the last block of a prefix first
            if kind is BlockStored:
                self._tell_stored(keys, rank, tier)
            else:
                self._index.removed_run(keys, rank, tier)
        for event in events:
            self._emit(event)
        if self._is_held and self._members.stores:
            self._hold(events)

    def _hold(self, events: list[Event]) -> None:
        """Have store ranks remember the blocks that are visible in DRAM now, for a later conductor."""
        held: dict[int, list[HeldBlock]] = {}
        for event in events:
            first = self._directory.find(event.key)
            if not isinstance(event, BlockStored) or event.tier != "dram" or first is None:
                continue
            for obj in visible_copies(first):
                if obj.rank == event.rank:
                    block = HeldBlock(
                        obj.ref, event.key, obj.digest, obj.sums, obj.parent, obj.position, obj.class_id
                    )
                    held.setdefault(self._members.keeper_of(obj.rank), []).append(block)
        for rank, blocks in held.items():
            self._emit(HoldBlocks(rank, blocks))

    def _tell_stored(self, keys: list[int], rank: int, tier: Tier) -> None:
        """Update the index, one chain of blocks at a time. A block whose DRAM copy is gone is on its own."""
        blocks = [self._directory.find(key) for key in keys]
        first = 0
        for end in range(1, len(keys) + 1):
            block = blocks[end] if end < len(keys) else None
            if block is None or block.parent != keys[end - 1]:
                chain = blocks[first]
                depth = chain.position if chain else 0
                self._index.stored_run(keys[first:end], depth, rank, tier)
                first = end

    def on_saved(self, saved: BlocksSaved, now: float) -> None:
        """Apply a store rank's report about blocks that it was told to save."""
        for key in saved.keys if saved.state != "written" else ():
            grant = self._saving.pop((saved.rank, key), None)
            if grant is not None:
                self._grants.tried.count("ssd_saves", 1, saved.state != "durable", saved.state)
                grant.about.discard(key)
                if not grant.about:
                    self._grants.close(grant.number)
        if saved.state == "written":
            self._directory.saved(saved.rank, saved.keys)
        elif saved.state == "durable":
            self._directory.durable(saved.rank, saved.keys)
        elif saved.state == "bad":
            self._directory.bad_in_dram(saved.rank, saved.keys)
        else:
            self._directory.dropped(saved.rank, saved.keys)

    def unsaved(self, rank: int, keys: list[int]) -> None:
        """Note that blocks will not be saved: the order was not sent, or has no answer."""
        self.on_saved(BlocksSaved(rank, 0, keys, "dropped"), 0.0)

    def _save_lost(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        self.unsaved(grant.rank, sorted(grant.about))
        self._grants.tried.reasons["ssd_saves"] = reason

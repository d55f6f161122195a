"""Prefix loads: blocks on their way from SSD into the DRAM that was allocated for them.

Used by `dispatch.py`, which decides how a request continues after its last LoadBlocks.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake_lite.control.books import Books
from mooncake_lite.control.effects import BlockRef, LoadBlocks
from mooncake_lite.control.events import BlocksLoaded
from mooncake_lite.control.grants import Grant
from mooncake_lite.control.request import RequestRecord
from mooncake_lite.control.room import Moves


class PrefixLoads:
    """The loads under way. Their grants are about a request, and the LoadBlocks.

    on_ended   called when the last load of a request has ended, with success or without
    """

    def __init__(self, books: Books, on_ended: Callable[[RequestRecord, float], None]) -> None:
        self._directory, self._members = books.directory, books.members
        self._grants, self._emit = books.grants, books.emit
        self._on_ended = on_ended

    def begin(self, record: RequestRecord, moves: Moves, now: float) -> None:
        """Order the blocks of a prefix from SSD, one order per tier and target segment."""
        for (rank, _), indices in moves.items():
            grant = self._grants.open(rank, None, self._lost, now, blocks=len(indices), kind="ssd_loads")
            refs = [record.present.load[index] for index in indices]
            keys = [record.keys[index] for index in indices]
            digests = [record.digests[index] for index in indices]
            order = LoadBlocks(rank, grant.number, keys, digests, refs)
            record.present.loads.add(grant.number)
            grant.about = record, order
            self._emit(order)

    def on_loaded(self, loaded: BlocksLoaded, now: float) -> None:
        """Apply the end of a load: good blocks become readable, and bad blocks are misses."""
        why = loaded.problem or "the tier has evicted or damaged them"
        grant = self._grants.end(loaded.rank, loaded.number, loaded.ok.count(False), why)
        if grant is None:
            return
        record, order = grant.about
        record.present.loads.discard(loaded.number)
        rank = loaded.rank
        for key, ref, ok, sums in zip(order.keys, order.refs, loaded.ok, loaded.checksums, strict=True):
            if ok and self._directory.has(ref.object_id):
                self._directory.put_end(ref.object_id, sums, now)
                continue
            record.present.bad_blocks += 1
            if ok:
                continue  # its segment is lost
            self._revoke(ref, rank, bool(loaded.problem) and loaded.may_still_write, now)
            if loaded.problem:
                record.avoids_ssd = True
            else:
                self._directory.drop_tier_block(rank, [key])
        nbytes = sum(ref.nbytes for ref, ok in zip(order.refs, loaded.ok) if ok)
        record.present.promoted.append((rank, loaded.seconds, nbytes, len(order.refs)))
        if not record.present.loads:
            self._on_ended(record, now)

    def _lost(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        record, order = grant.about
        record.present.loads.discard(grant.number)
        record.avoids_ssd = order.rank not in self._members.lost
        record.present.bad_blocks += len(order.refs)
        for ref in order.refs:
            self._revoke(ref, order.rank, may_still_write, now)
        if not record.present.loads:
            self._on_ended(record, now)

    def _revoke(self, ref: BlockRef, rank: int, may_still_write: bool, now: float) -> None:
        if self._directory.has(ref.object_id):
            self._directory.put_revoke(ref.object_id, now=now, writer_may_live=may_still_write, writer=rank)

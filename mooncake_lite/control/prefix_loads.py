"""Prefix loads: blocks on their way from SSD into the DRAM that was allocated for them.

Used by `dispatch.py`, which decides how a request continues after its last LoadBlocks.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake_lite.control.effects import BlockRef, Effect, LoadBlocks
from mooncake_lite.control.events import BlocksLoaded
from mooncake_lite.control.orders import Orders
from mooncake_lite.control.request import RequestRecord
from mooncake_lite.control.room import Moves
from store.directory import Directory


class PrefixLoads:
    """The loads under way: number of a LoadBlocks -> its request, and the order itself.

    on_ended   called when the last load of a request has ended, with success or without
    """

    def __init__(
        self,
        directory: Directory,
        orders: Orders,
        emit: Callable[[Effect], None],
        on_ended: Callable[[RequestRecord, float], None],
    ) -> None:
        self._directory, self._orders, self._emit, self._on_ended = directory, orders, emit, on_ended
        self._loading: dict[int, tuple[RequestRecord, LoadBlocks]] = {}

    def begin(self, record: RequestRecord, moves: Moves, now: float) -> None:
        """Order the blocks of a prefix from SSD, one order per tier and target segment."""
        for (rank, _), indices in moves.items():
            number = self._orders.begin(rank, self._give_up, now)
            refs = [record.load[index] for index in indices]
            keys = [record.keys[index] for index in indices]
            digests = [record.digests[index] for index in indices]
            order = LoadBlocks(rank, number, keys, digests, refs)
            record.loads.add(number)
            self._loading[number] = record, order
            self._emit(order)

    def on_loaded(self, loaded: BlocksLoaded, now: float) -> None:
        """Apply the end of a load: good blocks become readable, and bad blocks are misses."""
        if not self._orders.end(loaded.rank, loaded.number):
            return
        record, order = self._loading.pop(loaded.number)
        record.loads.discard(loaded.number)
        rank = loaded.rank
        for key, ref, ok, sums in zip(order.keys, order.refs, loaded.ok, loaded.checksums, strict=True):
            if ok:
                self._directory.put_end(ref.object_id, sums, now)
            elif loaded.problem:
                self._revoke(ref, rank, loaded.may_still_write, now)
                record.problem = loaded.problem
            else:
                self._revoke(ref, rank, False, now)
                self._directory.drop_tier_block(rank, [key])
                record.bad_blocks += 1
        nbytes = sum(ref.nbytes for ref, ok in zip(order.refs, loaded.ok) if ok)
        record.promoted.append((rank, loaded.seconds, nbytes, len(order.refs)))
        if not record.loads:
            self._on_ended(record, now)

    def _give_up(self, number: int, reason: str, may_still_write: bool, now: float) -> None:
        record, order = self._loading.pop(number)
        record.loads.discard(number)
        record.problem = reason
        for ref in order.refs:
            self._revoke(ref, order.rank, may_still_write, now)
        if not record.loads:
            self._on_ended(record, now)

    def _revoke(self, ref: BlockRef, rank: int, may_still_write: bool, now: float) -> None:
        self._directory.put_revoke(ref.object_id, now=now, writer_may_live=may_still_write, writer=rank)

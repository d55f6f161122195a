"""Puts: places in the pool for blocks that decode ranks have filled, until the rank reports.

Used by `machine.py`. A decode rank asks for places when blocks are full, writes the blocks, and reports.
"""

from __future__ import annotations

import contextlib

from mooncake_lite.control.books import Books
from mooncake_lite.control.effects import BlockRef, GrantPuts
from mooncake_lite.control.events import PutsEnded, PutsWanted
from mooncake_lite.control.grants import Grant
from mooncake_lite.control.pool import Pool
from mooncake_lite.control.requests import Requests
from mooncake_lite.control.room import Room
from store.errors import PoolFull


class Puts:
    """Grants places. A grant is about its name in _granted, the owner in the directory, and object ids.

    _granted    (rank, number of its question) -> number of the grant
    _answered   (rank, epoch) -> number of its latest question
    """

    def __init__(self, books: Books, requests: Requests, room: Room, pool: Pool) -> None:
        self._directory, self._members = books.directory, books.members
        self._grants, self._emit = books.grants, books.emit
        self._requests, self._room, self._pool = requests, room, pool
        self._granted: dict[tuple[int, int], int] = {}
        self._answered: dict[tuple[int, int], int] = {}

    def on_wanted(self, wanted: PutsWanted, now: float) -> None:
        """Grant a place per full block, or None if the pool has the block already or is full.

        A rank numbers its questions in order: one that comes again, or after a later one, is not answered.
        """
        last = self._answered.get((wanted.rank, wanted.epoch), 0)
        if wanted.number <= last:
            self._requests.ignored += 1
            return
        self._answered[wanted.rank, wanted.epoch] = wanted.number
        node = self._members.node_of(wanted.rank)
        owner = f"put/{wanted.rank}/{wanted.epoch}/{wanted.number}"
        places: list[BlockRef | None] = []
        for index, (key, digest) in enumerate(zip(wanted.keys, wanted.digests, strict=True)):
            places.append(None)
            if self._directory.lookup([key], [digest], now, touch=False):
                continue
            parent, position = wanted.before[index]
            class_id = self._requests.class_of(wanted.requests[index])
            block = self._room.keyed(key, digest, parent, position, class_id)
            with contextlib.suppress(PoolFull):
                (place,) = self._directory.allocate_many(owner, [block], now=now, node=node)
                places[-1] = place.ref
        ids = [place.object_id for place in places if place is not None]
        if ids:
            name = wanted.rank, wanted.number
            about = name, owner, ids
            grant = self._grants.open(wanted.rank, about, self._lost, now, blocks=len(ids), kind="puts")
            self._granted[name] = grant.number
        self._emit(GrantPuts(wanted.rank, wanted.number, places))

    def on_ended(self, ended: PutsEnded, now: float) -> None:
        """Publish the blocks that a rank has written, and free the places of the others."""
        number = self._granted.get((ended.rank, ended.number), 0)
        why = f"rank {ended.rank} could not write them"
        grant = self._grants.end(ended.rank, number, len(ended.failed), why)
        if grant is None:
            self._requests.ignored += 1
            return
        self._pool.publish(ended.object_ids, ended.checksums, now)
        self._lost(grant, "", ended.may_still_write, now)

    def undelivered(self, order: GrantPuts, reason: str, now: float) -> None:
        """Free the places that a rank does not hear of. It gives its blocks up by itself."""
        self._grants.fail(self._granted.get((order.rank, order.number), 0), reason, False, now)

    def granted(self, ended: PutsEnded) -> bool:
        """Tell whether a report names granted objects alone. True also when nothing is granted any more."""
        grant = self._grants.get(ended.rank, self._granted.get((ended.rank, ended.number), 0))
        return grant is None or {*ended.object_ids, *ended.failed} <= {*grant.about[2]}

    def _lost(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        """Free the places that are not visible, or let them wait for late bytes."""
        name, owner, _ = grant.about
        del self._granted[name]
        self._directory.revoke_owner(owner, now, writer_may_live=may_still_write, writer=grant.rank)

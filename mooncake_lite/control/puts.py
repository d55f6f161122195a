"""Puts: places in the pool for blocks that decode ranks have filled, until the rank reports.

Used by `machine.py`. A decode rank asks for places when blocks are full, writes the blocks, and reports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from mooncake_lite.control.effects import BlockRef, Effect, GrantPuts
from mooncake_lite.control.events import PutsEnded, PutsWanted
from mooncake_lite.control.members import Members
from mooncake_lite.control.pool import Pool
from mooncake_lite.control.requests import Requests
from mooncake_lite.control.room import Room
from store.directory import Directory
from store.errors import PoolFull


class Puts:
    """Granted places: object id -> (the rank that writes it, its owner in the directory)."""

    def __init__(
        self,
        directory: Directory,
        members: Members,
        requests: Requests,
        room: Room,
        pool: Pool,
        emit: Callable[[Effect], None],
    ) -> None:
        self._directory, self._members, self._room, self._pool = directory, members, room, pool
        self._requests, self._emit = requests, emit
        self._granted: dict[int, tuple[int, str]] = {}

    def on_wanted(self, wanted: PutsWanted, now: float) -> None:
        """Grant a place per full block, or None if the pool has the block already or is full."""
        node = self._members.node_of(wanted.rank)
        places: list[BlockRef | None] = []
        for index, (key, digest) in enumerate(zip(wanted.keys, wanted.digests, strict=True)):
            places.append(None)
            if self._directory.lookup([key], [digest], now, touch=False):
                continue
            owner = f"put/{wanted.rank}/{wanted.epoch}/{wanted.number}/{index}"
            parent, position = wanted.before[index]
            class_id = self._requests.class_of(wanted.requests[index])
            block = self._room.keyed(key, digest, parent, position, class_id)
            with contextlib.suppress(PoolFull):
                (place,) = self._directory.allocate_many(owner, [block], now=now, node=node)
                self._granted[place.object_id] = wanted.rank, owner
                places[-1] = place.ref
        self._emit(GrantPuts(wanted.rank, wanted.number, places))

    def on_ended(self, ended: PutsEnded, now: float) -> None:
        """Publish the blocks that a decode rank has written, and free the places of the others."""
        reported = zip(ended.object_ids, ended.checksums, strict=True)
        written = [(object_id, sums) for object_id, sums in reported if self._is_of(object_id, ended.rank)]
        ids = [object_id for object_id, _ in written]
        self._pool.publish(ids, [sums for _, sums in written], now)
        self.give_back(ids, ended.rank, now)
        self.give_back(ended.failed, ended.rank, now, may_still_write=ended.may_still_write)

    def give_back(
        self, object_ids: Iterable[int], rank: int, now: float, *, may_still_write: bool = False
    ) -> None:
        """End grants. Visible blocks stay; the other places are freed or quarantined."""
        for object_id in object_ids:
            if self._is_of(object_id, rank):
                _, owner = self._granted.pop(object_id)
                self._directory.revoke_owner(owner, now, writer_may_live=may_still_write, writer=rank)

    def _is_of(self, object_id: int, rank: int) -> bool:
        """Tell whether this place is granted to this rank."""
        granted = self._granted.get(object_id)
        return granted is not None and granted[0] == rank

    def check(self) -> None:
        """Assert that every granted place is in the directory, under its owner."""
        for object_id, (_, owner) in self._granted.items():
            assert self._directory.object(object_id).owner == owner

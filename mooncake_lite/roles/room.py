"""Room in the pool for requests: what one reuses is leased, and where its new KV will go is allocated.

Used by the conductor role alone; it drives the store's directory and sends nothing. Who may start, and what
happens when there is no room, is decided in `conductor.py`. Explained in docs/lifecycle.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from mooncake_lite.messages import BlockRef, PutEnded, PutGranted, PutWanted
from mooncake_lite.roles.members import Members
from mooncake_lite.roles.requests import RequestRecord
from store.directory import Directory
from store.errors import PoolFull
from store.objects import PoolObject, Wanted
from store.promotion import SecondHit

LEASE_S = 3600.0
"""A request's lease on its blocks ends when its KV has been read; this bound is for our own bugs."""


def block_ref(place: PoolObject) -> BlockRef:
    """How messages name a pool object: by one range, which is all that the pool of KV blocks asks for."""
    assert place.scattered is None
    return BlockRef(place.object_id, place.rank, place.offset, place.nbytes)


class Grant(NamedTuple):
    """A place that a decode rank was given for a block: its owner in the directory, what it stands for."""

    owner: str
    key: int
    tokens: list[int]
    parent: int | None


class Room:
    """The conductor's hand in the directory.

    s_per_token  what computing one token takes, as measured; it prices blocks for the eviction policy
    _grants      by object
    _promotion   which blocks read from SSD become visible in DRAM; the others are the request's alone
    """

    def __init__(self, directory: Directory, members: Members, block_tokens: int) -> None:
        assert directory.layout is not None, "the pool of KV blocks"
        self._directory = directory
        self._block_nbytes = directory.layout.nbytes
        self._members = members
        self._block_tokens = block_tokens
        self.s_per_token = 0.0
        self._grants: dict[int, Grant] = {}
        self._promotion = SecondHit()

    def reserve(self, record: RequestRecord, now: float) -> dict[tuple[int, int], list[int]]:
        """Fill in load, store and tail of a record; by (rank with the tier, rank whose DRAM gets it),
        which of load must come from SSD first.

        Raises PoolFull; what was taken until then belongs to the request, for revoke_owner.
        """
        directory, owner = self._directory, record.request_id
        node = self._members.node_of(record.prefill)
        hits = directory.lookup(record.keys, record.digests, now, node=node)
        in_dram = [hit.object_id for hit in hits if hit.object_id is not None]
        directory.lease(owner, in_dram, now, now + LEASE_S)
        on_ssd: dict[int, list[int]] = {}
        moves: dict[tuple[int, int], list[int]] = {}
        for index, hit in enumerate(hits):
            if hit.object_id is None:
                on_ssd.setdefault(hit.rank, []).append(index)
        record.load = [BlockRef(hit.object_id or 0, hit.rank, hit.offset, hit.nbytes) for hit in hits]
        for rank, indices in on_ssd.items():
            stays = [self._promotion.hit(record.keys[index], owner) for index in indices]
            wanted = [
                self._wanted(record, index) if stay else Wanted(self._block_nbytes)
                for index, stay in zip(indices, stays)
            ]
            places = directory.allocate_many(owner, wanted, now=now, node=node, first=rank)
            for index, place in zip(indices, places):
                record.load[index] = block_ref(place)
                moves.setdefault((rank, place.rank), []).append(index)
        self._place_new(record, now)
        mine = [ref.object_id for ref in record.load + record.store]
        directory.lease(owner, mine, now, now + LEASE_S)  # until decode has read them
        record.count_cached(self._block_tokens, {i for indices in on_ssd.values() for i in indices})
        return moves

    def _place_new(self, record: RequestRecord, now: float) -> None:
        """Places for the KV that prefill will write: full blocks, then the tail. Raises PoolFull."""
        full = len(record.token_ids) // self._block_tokens
        wanted = [self._wanted(record, index) for index in range(len(record.load), full)]
        has_tail = len(record.token_ids) % self._block_tokens > 0
        if has_tail:
            wanted.append(Wanted(self._block_nbytes))
        node = self._members.node_of(record.prefill)
        places = self._directory.allocate_many(record.request_id, wanted, now=now, node=node)
        record.store = [block_ref(place) for place in places]
        record.tail = record.store.pop() if has_tail else None

    def _wanted(self, record: RequestRecord, index: int) -> Wanted:
        """A full block of a request, under its key unless reuse is off."""
        if not record.keys:
            return Wanted(self._block_nbytes)
        parent = record.keys[index - 1] if index else None
        return Wanted(
            self._block_nbytes,
            record.keys[index],
            record.digests[index],
            self._cost_s,
            parent=parent,
            position=index,
        )

    @property
    def _cost_s(self) -> float:
        """Seconds that computing one block takes."""
        return self.s_per_token * self._block_tokens

    def grant(self, wanted: PutWanted, now: float) -> PutGranted:
        """Places for blocks that became full while decoding; a full pool or a known key means no place."""
        node = self._members.node_of(wanted.rank)
        places: list[BlockRef | None] = []
        for index, (key, digest) in enumerate(zip(wanted.keys, wanted.digests)):
            places.append(None)
            if self._directory.lookup([key], [digest], now, touch=False):
                continue
            owner = f"put/{wanted.rank}/{wanted.number}/{index}"
            with contextlib.suppress(PoolFull):
                parent, position = wanted.before[index]
                block = Wanted(
                    self._block_nbytes, key, digest, self._cost_s, parent=parent, position=position
                )
                (place,) = self._directory.allocate_many(owner, [block], now=now, node=node)
                self._grants[place.object_id] = Grant(owner, key, wanted.tokens[index], parent)
                places[-1] = block_ref(place)
        return PutGranted(wanted.number, places)

    def granted(self, object_ids: Iterable[int]) -> list[Grant]:
        """What the objects that a decode rank has written stand for."""
        return [self._grants[object_id] for object_id in object_ids if object_id in self._grants]

    def end(self, ended: PutEnded, now: float) -> None:
        """Granted places are done with: what is visible stays, the rest is freed.

        A range whose transfer failed may still get late bytes: nobody is given it again.
        """
        for object_ids, writing in ((ended.object_ids, False), (ended.failed, True)):
            for object_id in object_ids:
                grant = self._grants.pop(object_id, None)
                if grant is not None:
                    self._directory.revoke_owner(grant.owner, now, writer_may_live=writing)

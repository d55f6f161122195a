"""Room in the pool for requests: what one reuses is leased, and where its new KV will go is allocated.

Used by the conductor role alone; it drives the store's directory and sends nothing. Who may start, and what
happens when there is no room, is decided in `conductor.py`. Explained in docs/lifecycle.md.
"""

from __future__ import annotations

import contextlib
import itertools

from mooncake_lite.messages import BlockRef, PutEnded, PutGranted, PutWanted
from mooncake_lite.roles.members import Members
from mooncake_lite.roles.requests import RequestRecord
from store.directory import Directory
from store.errors import PoolFull
from store.objects import PoolObject, Wanted

LEASE_S = 3600.0
"""A request's lease on its blocks ends when its KV has been read; this bound is for our own bugs."""


def block_ref(place: PoolObject) -> BlockRef:
    """How messages name a pool object."""
    return BlockRef(place.object_id, place.rank, place.offset, place.nbytes)


class Room:
    """The conductor's hand in the directory.

    s_per_token   what computing one token takes, as measured; it prices blocks for the eviction policy
    _grants   owner in the directory of each object that a decode rank was given a place for
    """

    def __init__(self, directory: Directory, members: Members, block_tokens: int) -> None:
        self._directory = directory
        self._members = members
        self._block_tokens = block_tokens
        self.s_per_token = 0.0
        self._grants: dict[int, str] = {}

    def reserve(self, record: RequestRecord, now: float, use_ssd: bool) -> dict[int, list[int]]:
        """Fill in load, store and tail of a record; by store rank, which of load must come from SSD first.

        use_ssd False: the reused prefix ends at the first block that lies on SSD alone. Raises PoolFull; what
        was taken until then belongs to the request, for revoke_owner.
        """
        directory, owner = self._directory, record.request_id
        hits = directory.lookup(record.keys, record.digests, now)
        if not use_ssd:
            hits = list(itertools.takewhile(lambda hit: hit.object_id is not None, hits))
        in_dram = [hit.object_id for hit in hits if hit.object_id is not None]
        directory.lease(owner, in_dram, now, now + LEASE_S)
        on_ssd: dict[int, list[int]] = {}
        for index, hit in enumerate(hits):
            if hit.object_id is None:
                on_ssd.setdefault(hit.rank, []).append(index)
        record.load = [BlockRef(hit.object_id or 0, hit.rank, hit.offset, hit.nbytes) for hit in hits]
        for rank, indices in on_ssd.items():
            wanted = [self._wanted(record, index) for index in indices]
            places = directory.allocate_many(owner, wanted, now=now, rank=rank)
            for index, place in zip(indices, places):
                record.load[index] = block_ref(place)
        self._place_new(record, now)
        mine = [ref.object_id for ref in record.load + record.store]
        directory.lease(owner, mine, now, now + LEASE_S)  # until decode has read them
        record.count_cached(self._block_tokens, {i for indices in on_ssd.values() for i in indices})
        return on_ssd

    def _place_new(self, record: RequestRecord, now: float) -> None:
        """Places for the KV that prefill will write: full blocks, then the tail. Raises PoolFull."""
        full = len(record.token_ids) // self._block_tokens
        wanted = [self._wanted(record, index) for index in range(len(record.load), full)]
        has_tail = len(record.token_ids) % self._block_tokens > 0
        if has_tail:
            wanted.append(Wanted(self._directory.layout.nbytes))
        node = self._members.node_of(record.prefill)
        places = self._directory.allocate_many(record.request_id, wanted, now=now, node=node)
        record.store = [block_ref(place) for place in places]
        record.tail = record.store.pop() if has_tail else None

    def _wanted(self, record: RequestRecord, index: int) -> Wanted:
        """A full block of a request, under its key unless reuse is off."""
        nbytes = self._directory.layout.nbytes
        if not record.keys:
            return Wanted(nbytes)
        parent = record.keys[index - 1] if index else None
        return Wanted(
            nbytes, record.keys[index], record.digests[index], self._cost_s, parent=parent, position=index
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
                nbytes = self._directory.layout.nbytes
                block = Wanted(nbytes, key, digest, self._cost_s, parent=parent, position=position)
                (place,) = self._directory.allocate_many(owner, [block], now=now, node=node)
                self._grants[place.object_id] = owner
                places[-1] = block_ref(place)
        return PutGranted(wanted.number, places)

    def end(self, ended: PutEnded, now: float) -> None:
        """Granted places are done with: what is visible stays, the rest is freed.

        A range whose transfer failed may still get late bytes: nobody is given it again.
        """
        for object_id in ended.object_ids:
            self._directory.revoke_owner(self._grants.pop(object_id, ""), now)
        for object_id in ended.failed:
            self._directory.revoke_owner(self._grants.pop(object_id, ""), now, writer_may_live=True)

"""Space for KV: leases the blocks that a request reuses, and allocates places for its new KV.

Used by `machine.py`; drives the store's directory and decides nothing about requests.
See docs/explain/control.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from msgspec.structs import replace

from mooncake_lite.control.books import Books
from mooncake_lite.control.effects import BlockRef
from mooncake_lite.control.request import RequestRecord, Shortage
from store.books.promotion import Promotion
from store.errors import PoolFull
from store.objects import Found, PoolObject, Wanted

LEASE_S = 3600.0
"""Limit of a request's lease, which ends when its KV has been read. The limit guards against bugs of ours."""

Moves = dict[tuple[int, int], list[int]]
"""{(tier rank, target rank): indices of `load` to be read from SSD first}."""


class Room:
    """Leases and allocates for requests.

    _handover    where new KV goes: into the pool, into memory of the decode rank, or nowhere
    _promotion   decides which blocks from SSD stay in DRAM; the others are private to the request
    verifies     readers compare every block
    """

    def __init__(self, books: Books) -> None:
        self._directory, self._members, self._state = books.directory, books.members, books.state
        config = books.config
        self._handover, self._has_pool, layout = config.handover, config.has_pool, config.block_layout
        self._block_tokens, self._block_nbytes = layout.block_tokens, layout.nbytes
        self._promotion = Promotion()
        self.verifies = config.verify or not all(lost.ended for lost in config.lost)

    def reserve(self, record: RequestRecord, now: float) -> Moves:
        """Fill in load, store, tail and cached of a record.

        Returns {(tier rank, target rank): indices of `load` to read from SSD first}. Raises PoolFull. The
        request then still owns the space allocated so far; revoke_owner frees it.
        """
        directory, owner, present = self._directory, record.request_id, record.present
        node = self._members.node_of(present.prefill)
        hits = directory.lookup(record.keys, record.digests, now, node=node, class_id=record.asked.class_id)
        hits = self._usable(record, hits, node)
        in_dram = [hit.object_id for hit in hits if hit.object_id is not None]
        directory.lease(owner, in_dram, now, now + LEASE_S)
        present.load = [BlockRef(hit.object_id or 0, hit.rank, hit.offset, hit.nbytes) for hit in hits]
        moves = self._promotion_of(record, hits, node, now) if len(in_dram) < len(hits) else {}
        self._places_for_new(record, node, now)
        new = [ref.object_id for ref in present.store]
        new += [present.load[index].object_id for indices in moves.values() for index in indices]
        directory.lease(owner, new, now, now + LEASE_S)  # until decode has read them
        directory.judge(record.keys, hits)
        self._count_cached(record, {index for indices in moves.values() for index in indices})
        return moves

    def to_read(self, refs: list[BlockRef], now: float) -> list[BlockRef]:
        """Return places for an order to read them, with a check where the reader has to compare."""
        check_of, always = self._directory.check_of, self.verifies
        if not (always or self._directory.has_doubts):
            return refs
        return [replace(ref, check=check_of(ref.object_id, now, always=always)) for ref in refs]

    def written(self, record: RequestRecord, now: float) -> list[BlockRef]:
        """Return the leading full blocks of a request that are in the pool, each with a check."""
        found, check_of = [], self._directory.check_of
        for ref in (*record.present.load, *record.present.store):
            if not self._directory.has(ref.object_id) or self._directory.is_writing(ref.object_id):
                break
            found.append(replace(ref, check=check_of(ref.object_id, now, always=True)))
        return list(itertools.takewhile(lambda ref: ref.check, found))

    def _usable(self, record: RequestRecord, hits: list[Found], node: int) -> list[Found]:
        """Keep the leading blocks that a request may reuse."""
        fetch, node_of = record.present.fetch, self._members.node_of
        if record.avoids_ssd or not fetch:
            hits = list(itertools.takewhile(lambda hit: hit.object_id is not None, hits))
        if not fetch:
            hits = list(itertools.takewhile(lambda hit: node_of(hit.rank) == node, hits))
        return hits[: record.present.most_blocks]

    def _promotion_of(self, record: RequestRecord, hits: Sequence[Found], node: int, now: float) -> Moves:
        """Allocate DRAM for the blocks on SSD. A request that needs no other space does not wait for this."""
        try:
            return self._places_for_promotion(record, node, now)
        except PoolFull:
            if self._handover != "none":
                raise
        first = next(index for index, hit in enumerate(hits) if hit.object_id is None)
        owner, load = record.request_id, record.present.load[:first]
        record.present.load = load
        self._directory.revoke_owner(owner, now)
        self._directory.lease(owner, [ref.object_id for ref in load], now, now + LEASE_S)
        return {}

    def _places_for_promotion(self, record: RequestRecord, node: int, now: float) -> Moves:
        """Allocate DRAM for the blocks of `load` that are on SSD only, near their tier if possible."""
        on_ssd: dict[int, list[int]] = {}
        for index, ref in enumerate(record.present.load):
            if not ref.object_id:
                on_ssd.setdefault(ref.rank, []).append(index)
        moves: Moves = {}
        for rank, indices in on_ssd.items():
            stays = [self._promotion.hit(record.keys[index], record.request_id) for index in indices]
            wanted = [
                self._wanted(record, index) if stay else self._private(record)
                for index, stay in zip(indices, stays)
            ]
            places = self._directory.allocate_many(record.request_id, wanted, now=now, node=node, first=rank)
            for index, place in zip(indices, places):
                record.present.load[index] = place.ref
                moves.setdefault((rank, place.rank), []).append(index)
        return moves

    def _places_for_new(self, record: RequestRecord, node: int, now: float) -> None:
        """Allocate places for the KV that prefill writes: full blocks, then the tail. Raises PoolFull.

        A rank that decodes what it prefills keeps its KV. It offers full blocks to the pool later.
        """
        if self._handover == "none":
            return
        full, has_tail = divmod(record.num_tokens, self._block_tokens)
        wanted = [self._wanted(record, index) for index in range(len(record.present.load), full)]
        wanted += [self._private(record)] if has_tail else []
        only = self._only_segment(record)
        places = self._directory.allocate_many(record.request_id, wanted, now=now, node=node, rank=only)
        store = record.present.store = [place.ref for place in places]
        record.present.tail = store.pop() if has_tail else None

    def _only_segment(self, record: RequestRecord) -> int | None:
        """Return the rank whose segment takes a request's new KV. None: any segment of the pool."""
        return record.present.decode if self._handover == "direct" else None

    def shortage(self, record: RequestRecord, error: PoolFull) -> Shortage:
        """Return what a request lacks that could not be reserved, after its leases and objects were freed.

        If the bytes were too few, it needs that many more than there are now. Otherwise a share of another
        class or the cut of the space is in its way, and whatever is freed may help.
        """
        freed, reachable = self._directory.space(self._only_segment(record))
        lacking = error.needed_bytes - error.free_bytes - error.evictable_bytes
        key = next(iter(record.keys[len(record.present.load) :]), None)
        if key is not None and self._directory.find(key) is not None:
            key = None  # it could have been read, but may not be fetched
        return Shortage(freed, reachable + lacking if lacking > 0 else 0, key)

    def may_fit(self, record: RequestRecord) -> bool:
        """Tell whether a request that did not fit may fit now: space was freed, or its prefix has grown."""
        last, (freed, reachable) = record.present.shortage, self._directory.space(self._only_segment(record))
        if freed != last.freed and reachable >= last.least_bytes:
            return True
        return last.next_key is not None and self._directory.find(last.next_key) is not None

    def never_fits(self, record: RequestRecord, error: PoolFull, now: float) -> str:
        """Return why a request does not fit, even when every other request has ended; "" if it will.

        The blocks of its prefix that are pinned stay where they are, and the request reuses them if it may
        fetch them. What other classes hold of their shares stays too.
        """
        node = self._members.node_of(record.present.prefill)
        hits = self._directory.lookup(record.keys, record.digests, now, node=node, touch=False)
        hits = self._usable(record, hits, node)
        pinned = sum(isinstance(hit, PoolObject) and hit.hard_pinned() for hit in hits)
        blocks = -(-record.num_tokens // self._block_tokens)
        only = self._only_segment(record)
        spared = self._directory.spared(record.asked.class_id, hits, only)
        if self._directory.will_fit([self._block_nbytes] * (blocks - pinned + spared), only):
            return ""
        return f"{error}; shares of other classes keep {spared} blocks" if spared else str(error)

    def _wanted(self, record: RequestRecord, index: int) -> Wanted:
        """Describe a full block of a request: under its key, unless reuse is off or there is no pool."""
        keys = record.keys
        if not keys or not self._has_pool:
            return self._private(record)
        parent = keys[index - 1] if index else None
        return self.keyed(keys[index], record.digests[index], parent, index, record.asked.class_id)

    def _private(self, record: RequestRecord) -> Wanted:
        """Describe a block that only this request uses."""
        return Wanted(self._block_nbytes, class_id=record.asked.class_id)

    def keyed(self, key: int, digest: int, parent: int | None, position: int, class_id: int) -> Wanted:
        """Describe a block under its key. Its cost, for eviction policies, is the time to compute it."""
        start = position * self._block_tokens
        cost_s = self._state.costs.recompute_s(start + self._block_tokens, start)
        return Wanted(self._block_nbytes, key, digest, cost_s, class_id, parent=parent, position=position)

    def _count_cached(self, record: RequestRecord, from_ssd: set[int]) -> None:
        """Count reused tokens by tier. The last token of a full hit is computed again."""
        size, blocks = self._block_tokens, len(record.present.load)
        cached = {"dram": (blocks - len(from_ssd)) * size, "ssd": len(from_ssd) * size}
        if blocks and blocks * size == record.num_tokens:
            cached["ssd" if blocks - 1 in from_ssd else "dram"] -= 1
        record.present.cached = cached

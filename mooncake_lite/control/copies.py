"""Copies of blocks that a node reads from others again and again, and of those that racks pull or get pushed.

Used by `machine.py`. `scheduler.hot_spots` decides which blocks are hot; the directory says where there is
space, and evicts cold copies first. See docs/explain/conductor.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from mooncake_lite.control.books import Books
from mooncake_lite.control.effects import CopyBlocks
from mooncake_lite.control.events import BlocksCopied
from mooncake_lite.control.grants import TRANSFER_S, Grant
from mooncake_lite.control.request import RequestRecord
from mooncake_lite.control.room import LEASE_S
from scheduler.hot_spots import TIMES, HotSpots
from scheduler.placement import COPYING
from store.books.ledger import visible_copies
from store.errors import CopyExists, PoolFull, UnknownObject
from store.objects import ObjectState, PoolObject

EVERYWHERE = -1
"""The place of reads that are counted wherever they happen."""


class Copies:
    """Orders copies. Their grants are about the objects that will be visible, and a request that waits.

    on_pulled   called when the last copy that a request waits for has ended, with success or without
    """

    def __init__(self, books: Books, on_pulled: Callable[[RequestRecord, float], None]) -> None:
        self._directory, self._members = books.directory, books.members
        self._grants, self._emit = books.grants, books.emit
        self._on_pulled = on_pulled
        config = books.config
        self._site_copies = config.site_copies if config.racks else "none"
        times = TIMES if self._site_copies == "none" else config.copy_reads
        self._spots = HotSpots(config.balancing_threshold, times=times)
        self._idle_s = config.copy_cold_s
        self._is_on = config.policy in COPYING and self._site_copies == "none"

    def on_prefill(self, record: RequestRecord, now: float) -> None:
        """Copy the blocks that this prefill reads from other nodes and that are hot, or push those."""
        if self._site_copies == "push":
            self._push(record, now)
        if not (self._is_on and self._members.spans_nodes):
            return
        node = self._members.node_of(record.present.prefill)
        targets = self._members.stores_on(node)
        if not targets or not record.keys:
            return
        near = [self._members.node_of(ref.rank) == node for ref in record.present.load]
        self._copy(self._hot(record, node, near, now), targets, now)

    def pull(self, record: RequestRecord, now: float) -> bool:
        """Copy the hot blocks of a prefix into the rack that is to read them. Tells whether it waits."""
        present, rack_of = record.present, self._members.rack_of
        if self._site_copies != "pull" or not present.load:
            return False
        rack = rack_of(present.prefill)
        hot = self._hot(record, rack, [rack_of(ref.rank) == rack for ref in present.load], now)
        self._copy(hot, self._members.stores_in(rack), now, record)
        return bool(present.loads)

    def _push(self, record: RequestRecord, now: float) -> None:
        """Copy the blocks that are read often, wherever that is, to the racks that lack them."""
        members, find = self._members, self._directory.find
        hot = self._hot(record, EVERYWHERE, [False] * len(record.present.load), now)
        found = {key: first for key, _ in hot if (first := find(key)) is not None}
        has = {key: {members.rack_of(one.rank) for one in visible_copies(found[key])} for key in found}
        for rack in sorted({members.rack_of(store) for store in members.stores}) if found else ():
            lacks = [block for block in hot if rack not in has.get(block[0], (rack,))]
            self._copy(lacks, members.stores_in(rack), now)

    def _hot(self, record: RequestRecord, place: int, near: list[bool], now: float) -> list[tuple[int, int]]:
        """Count reads of a prefix. Returns key and digest of the blocks that are hot now."""
        hot = set(self._spots.on_read(place, record.keys[: len(near)], near, now))
        return [pair for pair in zip(record.keys, record.digests) if pair[0] in hot] if hot else []

    def share(
        self, tenant: str, blocks: list[tuple[int, int]], besides: set[int], most: int, now: float
    ) -> list[int]:
        """Order copies of blocks, (key, digest) each, on so many further stores; the stores with the most
        space first. besides: ranks that have them. Returns how many blocks each of the stores gets."""
        stores = [rank for rank in self._members.stores if self._directory.has_segment(rank)]
        rooms = {rank: self._directory.space_for_copies(rank, now) for rank in stores if rank not in besides}
        targets = sorted(rooms, key=lambda rank: rooms[rank], reverse=True)[:most]
        return [
            count for count in (self._copy(blocks, [rank], now, tenant=tenant) for rank in targets) if count
        ]

    def _copy(
        self,
        blocks: list[tuple[int, int]],
        targets: list[int],
        now: float,
        reader: RequestRecord | None = None,
        tenant: str | None = None,
    ) -> int:
        """Order copies from the store rank with the most space, for all blocks that fit there; return how
        many.

        A copy takes space that is free, or that holds a block which was not used for `copy_cold_s`. Other
        blocks may be as hot: hot prefixes that displace each other would be copied again and again. A reader
        waits for the copies. tenant: whose hint asked for them.
        """
        if not blocks or not targets:
            return 0
        target = max(targets, key=lambda rank: self._directory.space_for_copies(rank, now))
        grant = self._grants.open(target, None, self._lost, now, kind="copies")
        replicate = partial(
            self._directory.replicate, _owner(grant), rank=target, now=now, until=now + TRANSFER_S
        )
        pairs: list[tuple[PoolObject, PoolObject]] = []
        for key, digest in blocks:
            with contextlib.suppress(PoolFull, CopyExists, UnknownObject):
                one = partial(replicate, key, digest, idle_s=self._idle_s)
                pairs.append(one() if tenant is None else self._directory.replicate_for(tenant, one))
        if not pairs:
            self._grants.close(grant.number)
            return 0
        grant.about, grant.blocks = ([made for _, made in pairs], reader), len(pairs)
        if reader is not None:
            reader.present.loads.add(grant.number)
        sources, targets_ = [source.ref for source, _ in pairs], [made.ref for _, made in pairs]
        self._emit(CopyBlocks(target, grant.number, sources, targets_))
        return len(pairs)

    def on_copied(self, copied: BlocksCopied, now: float) -> None:
        """Make finished copies visible, and free those that failed or differ from their originals."""
        why = f"rank {copied.rank} could not read or write them, or an original is damaged"
        grant = self._grants.end(copied.rank, copied.number, copied.checksums.count([]), why)
        if grant is None:
            return
        for obj, checksums in zip(grant.about[0], copied.checksums):
            if checksums and self._directory.has(obj.object_id):
                self._directory.put_end(obj.object_id, checksums, now)
        self._lost(grant, "", copied.may_still_write, now)

    def _lost(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        made, reader = grant.about
        if reader is not None:  # it reads what has come, and the rest where it was
            ready = {obj.key: obj for obj in made if obj.state is ObjectState.VISIBLE}
            ids = [obj.object_id for obj in ready.values()]
            self._directory.lease(reader.request_id, ids, now, now + LEASE_S)
            load = zip(reader.keys, reader.present.load)
            reader.present.load = [ready[key].ref if key in ready else ref for key, ref in load]
        self._directory.revoke_owner(_owner(grant), now, writer_may_live=may_still_write, writer=grant.rank)
        if reader is not None:
            reader.present.loads.discard(grant.number)
            if not reader.present.loads:
                self._on_pulled(reader, now)


def _owner(grant: Grant) -> str:
    """Return the owner of the copies in the directory."""
    return f"copy/{grant.number}"

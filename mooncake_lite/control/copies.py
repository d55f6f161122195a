"""Hot-spot replication: orders copies of blocks that a node reads from other nodes again and again.

Used by `machine.py`. `scheduler.hot_spots` decides which blocks are hot; the directory says where there is
space, and evicts cold copies first. See docs/explain/conductor.md.
"""

from __future__ import annotations

import contextlib
from functools import partial

from mooncake_lite.control.books import Books
from mooncake_lite.control.effects import CopyBlocks
from mooncake_lite.control.events import BlocksCopied
from mooncake_lite.control.grants import TRANSFER_S, Grant
from mooncake_lite.control.request import RequestRecord
from scheduler.hot_spots import HotSpots
from scheduler.placement import COPYING
from store.errors import CopyExists, PoolFull, UnknownObject
from store.objects import PoolObject


class Copies:
    """Orders copies. Their grants are about the objects that will be visible."""

    def __init__(self, books: Books) -> None:
        self._directory, self._members = books.directory, books.members
        self._grants, self._emit = books.grants, books.emit
        self._spots = HotSpots(books.config.balancing_threshold)
        self._idle_s = books.config.copy_cold_s
        self._is_on = books.config.policy in COPYING

    def on_prefill(self, record: RequestRecord, now: float) -> None:
        """Copy the blocks that this prefill reads from other nodes and that are hot."""
        if not (self._is_on and self._members.spans_nodes):
            return
        node = self._members.node_of(record.present.prefill)
        targets = self._members.stores_on(node)
        if not targets or not record.keys:
            return
        near = [self._members.node_of(ref.rank) == node for ref in record.present.load]
        hot = self._spots.on_read(node, record.keys[: len(near)], near, now)
        if hot:
            digest_of = dict(zip(record.keys, record.digests))
            self._copy([(key, digest_of[key]) for key in hot], targets, now)

    def _copy(self, blocks: list[tuple[int, int]], targets: list[int], now: float) -> None:
        """Order copies from the store rank with the most space, for all blocks that fit there.

        A copy takes space that is free, or that holds a block which was not used for `copy_cold_s`. Other
        blocks may be as hot: hot prefixes that displace each other would be copied again and again.
        """
        target = max(targets, key=lambda rank: self._directory.space_for_copies(rank, now))
        grant = self._grants.open(target, None, self._lost, now, kind="copies")
        replicate = partial(
            self._directory.replicate, _owner(grant), rank=target, now=now, until=now + TRANSFER_S
        )
        pairs: list[tuple[PoolObject, PoolObject]] = []
        for key, digest in blocks:
            with contextlib.suppress(PoolFull, CopyExists, UnknownObject):
                pairs.append(replicate(key, digest, idle_s=self._idle_s))
        if not pairs:
            self._grants.close(grant.number)
            return
        grant.about, grant.blocks = [made for _, made in pairs], len(pairs)
        sources, targets_ = [source.ref for source, _ in pairs], [made.ref for _, made in pairs]
        self._emit(CopyBlocks(target, grant.number, sources, targets_))

    def on_copied(self, copied: BlocksCopied, now: float) -> None:
        """Make finished copies visible, and free those that failed or differ from their originals."""
        why = f"rank {copied.rank} could not read or write them, or an original is damaged"
        grant = self._grants.end(copied.rank, copied.number, copied.checksums.count([]), why)
        if grant is None:
            return
        for obj, checksums in zip(grant.about, copied.checksums):
            if checksums and self._directory.has(obj.object_id):
                self._directory.put_end(obj.object_id, checksums, now)
        self._lost(grant, "", copied.may_still_write, now)

    def _lost(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        self._directory.revoke_owner(_owner(grant), now, writer_may_live=may_still_write, writer=grant.rank)


def _owner(grant: Grant) -> str:
    """Return the owner of the copies in the directory."""
    return f"copy/{grant.number}"

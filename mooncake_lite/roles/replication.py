"""The conductor's hand in hot-spot replication: asks the policy, allocates the copy, has it made.

Used by the conductor role alone. Which blocks are hot is decided in `scheduler.hot_spots`; a store rank reads
their bytes from another one over MPI (`roles/store.py`). Cold copies go first when room runs out, which the
directory sees to. See docs/explain/paper.md.
"""

from __future__ import annotations

import contextlib

from mooncake_lite import messages as m
from mooncake_lite.roles.members import Members
from mooncake_lite.roles.pool import Pool, Send
from mooncake_lite.roles.requests import RequestRecord
from mooncake_lite.roles.room import block_ref
from scheduler.hot_spots import HotSpots
from store.errors import CopyExists, PoolFull, UnknownObject
from store.objects import PoolObject

COPY_LIMIT_S = 120.0
"""What is copied is leased for so long at most; this bound is for our own bugs."""


class Replicator:
    """Copies that are being made: by the number of their CopyBlocks, the objects that will be visible."""

    def __init__(self, pool: Pool, members: Members, send: Send) -> None:
        self._pool, self._members, self._send = pool, members, send
        self._spots = HotSpots()
        self._copying: dict[int, list[PoolObject]] = {}
        self._number = 0

    def on_prefill(self, record: RequestRecord, now: float) -> None:
        """A prefill begins: what it reads from another node too often is copied to its own."""
        node = self._members.node_of(record.prefill)
        targets = self._stores_on(node)
        if not targets or not self._members.spans_hosts:
            return
        near = [self._members.node_of(ref.rank) == node for ref in record.load]
        hot = self._spots.on_read(node, record.keys[: len(near)], near, now)
        if hot:
            digest_of = dict(zip(record.keys, record.digests))
            self._copy([(key, digest_of[key]) for key in hot], targets, now)

    def _stores_on(self, node: int) -> list[int]:
        stores = [hello.rank for hello in self._members.ranks.values() if hello.role == "store"]
        return [rank for rank in stores if self._members.node_of(rank) == node]

    def _copy(self, blocks: list[tuple[int, int]], targets: list[int], now: float) -> None:
        """One message to one store rank for all that fits there."""
        self._number += 1
        target = targets[self._number % len(targets)]
        owner = f"copy/{self._number}"
        pairs: list[tuple[PoolObject, PoolObject]] = []
        for key, digest in blocks:
            with contextlib.suppress(PoolFull, CopyExists, UnknownObject):
                pairs.append(
                    self._pool.directory.replicate(
                        owner, key, digest, rank=target, now=now, until=now + COPY_LIMIT_S
                    )
                )
        if not pairs:
            return
        copy = m.CopyBlocks(
            self._number,
            [block_ref(source) for source, _ in pairs],
            [block_ref(made) for _, made in pairs],
        )
        self._copying[self._number] = [made for _, made in pairs]
        if not self._send(f"rank-{target}", copy):
            self.on_copied(m.BlocksCopied(self._number, [[]] * len(pairs), writing=False), now)

    def on_copied(self, copied: m.BlocksCopied, now: float) -> None:
        """Copies become visible beside their originals; those that failed or differ are given up."""
        made = self._copying.pop(copied.number, [])
        directory = self._pool.directory
        for obj, checksums in zip(made, copied.checksums):
            if checksums:
                directory.put_end(obj.object_id, checksums, now)
        directory.revoke_owner(f"copy/{copied.number}", now, writer_may_live=copied.writing)
        self._pool.tell(now)

"""Swaps: space in the pool for the KV of sequences that a rank preempts, until they are resumed.

Used by `reports.py`. A rank asks for space, writes what the pool lacks, and reports. Any rank may then load
the KV and go on. See docs/explain/paged-memory.md.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake_lite.control.config import ControlConfig
from mooncake_lite.control.effects import BlockRef, Effect, GrantSwap
from mooncake_lite.control.events import DecodeEnded, Preempted, Swapped, SwapWanted
from mooncake_lite.control.members import Members
from mooncake_lite.control.request import Kept
from mooncake_lite.control.room import LEASE_S
from store.directory import Directory
from store.errors import PoolFull
from store.objects import Wanted


class Swaps:
    """Swaps that have begun: (request, branch) -> where the KV will be."""

    def __init__(
        self, directory: Directory, members: Members, config: ControlConfig, emit: Callable[[Effect], None]
    ) -> None:
        self._directory, self._members, self._emit = directory, members, emit
        self._block_tokens = config.block_layout.block_tokens
        self._block_nbytes = config.block_layout.nbytes
        self._begun: dict[tuple[str, int], Kept] = {}

    def begin(self, wanted: SwapWanted, owner: str, class_id: int, now: float) -> None:
        """Give a rank places for the blocks of a sequence of this class that the pool lacks, all or none."""
        places = None
        try:
            places = self._places(wanted, owner, class_id, now)
        except PoolFull:
            self._directory.revoke_owner(owner, now)
        self._grant(wanted, places)

    def refuse(self, wanted: SwapWanted) -> None:
        """Have the rank give the KV up."""
        self._grant(wanted, None)

    def _grant(self, wanted: SwapWanted, places: list[BlockRef | None] | None) -> None:
        self._emit(GrantSwap(wanted.rank, wanted.request_id, wanted.attempt, wanted.branch, places))

    def _places(self, wanted: SwapWanted, owner: str, class_id: int, now: float) -> list[BlockRef | None]:
        """Lease what the pool has, and allocate space for the rest. Raises PoolFull.

        Returns the places to be written, block by block: None for a block that the pool has.
        """
        node = self._members.node_of(wanted.rank)
        has: dict[int, BlockRef] = {}
        for number, (key, digest) in enumerate(zip(wanted.keys, wanted.digests, strict=True)):
            for hit in self._directory.lookup([key], [digest], now, node=node, touch=False):
                if hit.object_id is not None:
                    has[number] = BlockRef(hit.object_id, hit.rank, hit.offset, hit.nbytes)
        self._directory.lease(owner, [ref.object_id for ref in has.values()], now, now + LEASE_S)
        full, partial = divmod(wanted.num_tokens, self._block_tokens)
        blocks = full + (partial > 0)
        private = [Wanted(self._block_nbytes, class_id=class_id)] * (blocks - len(has))
        new = iter(self._directory.allocate_many(owner, private, now=now, node=node))
        places = [None if number in has else next(new).ref for number in range(blocks)]
        refs = [has.get(number) or place for number, place in enumerate(places)]
        known = [ref for ref in refs if ref is not None]
        self._begun[wanted.request_id, wanted.branch] = Kept(
            owner, known[:full], known[full] if partial else None
        )
        return places

    def end(self, event: Preempted | Swapped | DecodeEnded, now: float) -> Kept | None:
        """End a swap. Returns where the KV is; None, and frees the space, if it was given up."""
        kept = self._begun.pop((event.request_id, event.branch), None)
        if isinstance(event, Swapped):
            return kept
        if kept is not None:
            late = isinstance(event, Preempted) and event.may_still_write
            self._free(kept, now, late, event.rank)
        return None

    def forget(self, request_id: str, now: float, *, may_still_write: bool, writer: int) -> None:
        """Free the space of all swaps of a request that has ended."""
        for name in [name for name in self._begun if name[0] == request_id]:
            self._free(self._begun.pop(name), now, may_still_write, writer)

    def _free(self, kept: Kept, now: float, may_still_write: bool, writer: int) -> None:
        self._directory.revoke_owner(kept.owner, now, writer_may_live=may_still_write, writer=writer)

    def knows(self, owner: str) -> bool:
        """Tell whether a swap that has not ended has this owner in the directory."""
        return any(kept.owner == owner for kept in self._begun.values())

"""Swaps: space in the pool for the KV of sequences that a rank preempts, until they are resumed.

Used by `reports.py`. A rank asks for space, writes what the pool lacks, and reports. Any rank may then load
the KV and go on. See docs/explain/paged-memory.md.
"""

from __future__ import annotations

from mooncake_lite.control.books import Books
from mooncake_lite.control.effects import BlockRef, GrantSwap
from mooncake_lite.control.events import DecodeEnded, Preempted, Swapped, SwapWanted
from mooncake_lite.control.grants import Grant
from mooncake_lite.control.request import Kept
from mooncake_lite.control.room import LEASE_S
from store.errors import PoolFull
from store.objects import Wanted


class Swaps:
    """Swaps that have begun. Their grants are about where the KV will be, and which places are written.

    _begun   (request, branch) -> number of the grant
    """

    def __init__(self, books: Books) -> None:
        self._directory, self._members = books.directory, books.members
        self._grants, self._emit = books.grants, books.emit
        layout = books.config.block_layout
        self._block_tokens, self._block_nbytes = layout.block_tokens, layout.nbytes
        self._begun: dict[tuple[str, int], int] = {}

    def begin(self, wanted: SwapWanted, owner: str, class_id: int, now: float) -> None:
        """Give a rank places for the blocks of a sequence of this class that the pool lacks, all or none."""
        if (wanted.request_id, wanted.branch) in self._begun:
            return  # the question comes again
        places = None
        try:
            places = self._places(wanted, owner, class_id, now)
        except PoolFull:
            self._directory.revoke_owner(owner, now)
        self.grant(wanted, places)

    def grant(self, wanted: SwapWanted, places: list[BlockRef | None] | None) -> None:
        """Answer a rank: where its blocks go, as in GrantSwap; None has it give the KV up."""
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
        name, written = (wanted.request_id, wanted.branch), [ref for ref in places if ref is not None]
        kept = Kept(owner, known[:full], known[full] if partial else None)
        self._begun[name] = self._grants.open(wanted.rank, (name, kept, written), self._lost, now).number
        return places

    def end(self, event: Preempted | Swapped | DecodeEnded, now: float) -> Kept | None:
        """End a swap. Returns where the KV is; None, and frees the space, if it was given up."""
        grant = self._grants.end(event.rank, self._begun.pop((event.request_id, event.branch), 0))
        if grant is None:
            return None
        why = f"rank {event.rank} gave its KV up: not all of it was written"
        self._grants.tried.count(
            "swaps", not isinstance(event, DecodeEnded), isinstance(event, Preempted), why
        )
        kept: Kept = grant.about[1]
        if isinstance(event, Swapped):
            for ref, sums in zip(grant.about[2], event.checksums):
                self._directory.note_sums(ref.object_id, sums)
        if isinstance(event, Swapped) and all(self._directory.has(ref.object_id) for ref in kept.places):
            return kept
        late = isinstance(event, Preempted) and event.may_still_write
        self._lost(grant, "", late, now)
        return None

    def undelivered(self, order: GrantSwap, reason: str, now: float) -> None:
        """Free the space of a swap whose rank does not hear of it. The rank gives the KV up by itself."""
        self._grants.fail(self._begun.get((order.request_id, order.branch), 0), reason, False, now)

    def forget(self, request_id: str, now: float, *, may_still_write: bool) -> None:
        """Free the space of all swaps of a request that has ended."""
        for name in [name for name in self._begun if name[0] == request_id]:
            self._grants.fail(self._begun[name], "its request has ended", may_still_write, now)

    def _lost(self, grant: Grant, reason: str, may_still_write: bool, now: float) -> None:
        name, kept, _ = grant.about
        self._begun.pop(name, None)
        self._directory.revoke_owner(kept.owner, now, writer_may_live=may_still_write, writer=grant.rank)

    def owners(self) -> set[str]:
        """Return the owners in the directory of all swaps that have not ended."""
        grants = (self._grants[number] for number in self._begun.values())
        return {grant.about[1].owner for grant in grants}

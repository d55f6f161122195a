"""Which blocks the store ranks' SSD tiers hold, and which are on their way there. Pure bookkeeping.

Used by `store.directory` alone, fed by what store ranks report; knows no files.
Explained in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from store.objects import BlockRemoved, BlockStored, Hit


class TierIndex:
    """The tiers of all ranks.

        _held    key -> (digest, hits): one Hit per rank whose tier has it, oldest first
        _saving  key -> (rank, digest): handed to the rank's writer, not durable yet
        counts   rank -> number of keys in its tier

    Invariant: hits are never empty; counts agree with them.
    """

    def __init__(self, block_nbytes: int):
        self.block_nbytes = block_nbytes
        self.counts: dict[int, int] = {}
        self._held: dict[int, tuple[int, tuple[Hit, ...]]] = {}
        self._saving: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Distinct keys held."""
        return len(self._held)

    @property
    def get(self) -> Callable[[int], tuple[int, tuple[Hit, ...]] | None]:
        """key -> (digest, hits) or None. The dictionary's own method: called per block of every lookup."""
        return self._held.get

    def places(self) -> set[tuple[int, int, str]]:
        """Every (key, rank, "ssd") held."""
        return {(key, hit.rank, hit.tier) for key, (_, hits) in self._held.items() for hit in hits}

    def add(self, rank: int, keys: Sequence[int], digests: Sequence[int]) -> list[BlockStored]:
        """These are in the tier of rank. A key held elsewhere with another digest is left out."""
        events = []
        self.counts.setdefault(rank, 0)
        for key, digest in zip(keys, digests, strict=True):
            known, hits = self._held.get(key, (digest, ()))
            if known != digest or any(hit.rank == rank for hit in hits):
                continue
            self._held[key] = (digest, (*hits, Hit(key, "ssd", None, rank, 0, self.block_nbytes)))
            self.counts[rank] += 1
            events.append(BlockStored(key, rank, "ssd"))
        return events

    def remove(self, rank: int, keys: Iterable[int]) -> list[BlockRemoved]:
        """These are no longer in the tier of rank; unknown ones are passed over."""
        events = []
        for key in keys:
            digest, hits = self._held.get(key, (0, ()))
            left = tuple(hit for hit in hits if hit.rank != rank)
            if len(left) == len(hits):
                continue
            if left:
                self._held[key] = (digest, left)
            else:
                del self._held[key]
            self.counts[rank] -= 1
            events.append(BlockRemoved(key, rank, "ssd"))
        return events

    def forget(self, keys: Iterable[int]) -> list[BlockRemoved]:
        """These are to leave every tier, and shall not appear in one that is about to have them."""
        events = []
        for key in keys:
            self._saving.pop(key, None)
            for hit in self._held.get(key, (0, ()))[1]:
                events += self.remove(hit.rank, [key])
        return events

    def knows(self, key: int) -> bool:
        """Whether any tier has it, or is about to."""
        return key in self._held or key in self._saving

    def keys(self) -> set[int]:
        """All that any tier has, or is about to."""
        return set(self._held).union(self._saving)

    def remove_rank(self, rank: int) -> list[BlockRemoved]:
        """The tier of rank has gone, and what was on its way there."""
        self._saving = {key: saving for key, saving in self._saving.items() if saving[0] != rank}
        keys = [key for key, (_, hits) in self._held.items() if any(hit.rank == rank for hit in hits)]
        events = self.remove(rank, keys)
        self.counts.pop(rank, None)
        return events

    def start_save(self, rank: int, key: int, digest: int) -> None:
        """The block, which no tier knows, is handed to the rank's writer."""
        assert not self.knows(key)
        self._saving[key] = rank, digest

    def end_save(self, rank: int, keys: Iterable[int], *, durable: bool) -> list[BlockStored]:
        """Sealed in a file, or dropped on the way. Keys that were not on their way are passed over."""
        found = {key: saving[1] for key in keys if (saving := self._saving.get(key)) and saving[0] == rank}
        for key in found:
            del self._saving[key]
        return self.add(rank, list(found), list(found.values())) if durable else []

    @property
    def saving(self) -> int:
        """Blocks on their way to a tier."""
        return len(self._saving)

    def check(self) -> None:
        """Assert the invariant (tests)."""
        counts = dict.fromkeys(self.counts, 0)
        for key, (_, hits) in self._held.items():
            assert hits
            assert len({hit.rank for hit in hits}) == len(hits), f"key {key:x} twice in one tier"
            for hit in hits:
                assert hit.key == key
                counts[hit.rank] += 1
        assert counts == self.counts

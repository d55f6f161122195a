"""The index of the store ranks' SSD tiers: the blocks that they hold or are about to hold. Pure.

Used by `store.directory` alone, which feeds it with the reports of store ranks. Knows no files.
Explained in docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from store.objects import BlockRemoved, BlockStored, Hit


class TierIndex:
    """The tiers of all ranks.

        _held    key -> (digest, hits): one Hit per rank whose tier has it, oldest first
        _saving  key -> (rank, digest): handed to the rank's writer, not durable yet
        counts   rank -> number of keys in its tier

        get      the function key -> (digest, hits) or None: the dictionary's own method, because every
                 lookup calls it for each block

    Invariant: hits are never empty; counts agree with them.
    """

    def __init__(self, block_nbytes: int):
        self.block_nbytes = block_nbytes
        self.counts: dict[int, int] = {}
        self._held: dict[int, tuple[int, tuple[Hit, ...]]] = {}
        self.get = self._held.get
        self._saving: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Return the number of distinct keys that tiers hold."""
        return len(self._held)

    def places(self) -> set[tuple[int, int, str]]:
        """Return (key, rank, "ssd") of every block that a tier holds."""
        return {(key, hit.rank, hit.tier) for key, (_, hits) in self._held.items() for hit in hits}

    def add(self, rank: int, keys: Sequence[int], digests: Sequence[int]) -> list[BlockStored]:
        """Add keys that the tier of rank holds, except those that another tier holds with another digest."""
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
        """Remove keys from the tier of rank; unknown ones are ignored."""
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
        """Remove keys from every tier, and from saves under way."""
        events = []
        for key in keys:
            self._saving.pop(key, None)
            for hit in self._held.get(key, (0, ()))[1]:
                events += self.remove(hit.rank, [key])
        return events

    def knows(self, key: int) -> bool:
        """Tell whether any tier has a key, or is about to."""
        return key in self._held or key in self._saving

    def keys(self) -> set[int]:
        """Return the keys that any tier has, or is about to have."""
        return set(self._held).union(self._saving)

    def remove_rank(self, rank: int) -> list[BlockRemoved]:
        """Remove the tier of a lost rank, with the saves under way to it."""
        self._saving = {key: saving for key, saving in self._saving.items() if saving[0] != rank}
        keys = [key for key, (_, hits) in self._held.items() if any(hit.rank == rank for hit in hits)]
        events = self.remove(rank, keys)
        self.counts.pop(rank, None)
        return events

    def start_save(self, rank: int, key: int, digest: int) -> None:
        """Note that a block, which no tier knows, is handed to the rank's writer."""
        assert not self.knows(key)
        self._saving[key] = rank, digest

    def end_save(self, rank: int, keys: Iterable[int], *, durable: bool) -> list[BlockStored]:
        """End saves: sealed in a file (durable), or dropped. Keys without a save under way are ignored."""
        found = {key: saving[1] for key in keys if (saving := self._saving.get(key)) and saving[0] == rank}
        for key in found:
            del self._saving[key]
        return self.add(rank, list(found), list(found.values())) if durable else []

    @property
    def saving(self) -> int:
        """Return the number of blocks on their way to a tier."""
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

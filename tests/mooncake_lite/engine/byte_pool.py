"""A pool in this process: blocks of bytes by place, moved at once, and keys of those that may be reused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from store.objects import BlockRef
from store.tier import HDF5Tier
from transport.bulk.batch import Transfer


class _Ended:
    """A batch of transfers that is over."""

    may_still_land: frozenset[int] = frozenset()

    def poll(self) -> bool:
        return True

    def wait(self, _timeout_s: float) -> None:
        """Do nothing."""


class BytePool:
    """Stands where a rank has its transfers, and where a cluster has its directory.

    keys     places of the blocks that may be reused
    offers   keys of the blocks of an offer that have got a place, by (rank, number of the offer)
    swaps    places of the blocks of sequences that are swapped out
    """

    def __init__(self, block_nbytes: int) -> None:
        self._nbytes = block_nbytes
        self._offsets = itertools.count(0, block_nbytes)
        self._blocks: dict[int, np.ndarray] = {}
        self.keys: dict[int, BlockRef] = {}
        self.offers: dict[tuple[int, int], list[int]] = {}
        self.swaps: dict[Any, list[BlockRef]] = {}

    def new_place(self) -> BlockRef:
        """Return a place that no block has had before."""
        return BlockRef(0, 0, next(self._offsets), self._nbytes)

    def publish(self, keys: Sequence[int], places: Sequence[BlockRef]) -> None:
        """Let blocks be reused. A last block that is not full has no key."""
        for key, place in zip(keys, places):
            self.keys.setdefault(key, place)

    def leading(self, keys: Sequence[int]) -> list[BlockRef]:
        """Return the places of the first blocks of a chain that are here."""
        return [self.keys[key] for key in itertools.takewhile(self.keys.__contains__, keys)]

    def through(self, tier: HDF5Tier) -> None:
        """Save the blocks that may be reused to a tier, and load them from there."""
        for key, place in self.keys.items():
            block = self._blocks[place.offset]
            assert tier.append(key, 0, tier.layout.checksums(block), block, 0.0)
        assert set(tier.seal()) == self.keys.keys()
        for key, place in self.keys.items():
            self._blocks[place.offset] = np.zeros(self._nbytes, np.uint8)
            tier.load(key, self._blocks[place.offset])

    def submit(self, moves: Sequence[Transfer], label: object) -> _Ended:
        """Move bytes, as transport.engine.TransferEngine.submit does."""
        for move in moves:
            start = move.offset % self._nbytes
            block = self._blocks.setdefault(move.offset - start, np.zeros(self._nbytes, np.uint8))
            part = block[start : start + move.nbytes]
            if move.op == "write":
                part[:] = move.local[: move.nbytes]
            else:
                move.local[: move.nbytes] = part
        return _Ended()

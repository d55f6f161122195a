"""Blocks that a store rank was told to hold for a later conductor: in its segment, and in those it keeps.

Used by the store role and by the simulator. Pure. The list may name blocks that were evicted or overwritten
since, so readers compare checksums. Explained in docs/explain/failures.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from store.objects import HeldBlock

PIECE = 1024
"""Blocks in one message: less than a megabyte, also of 80 layers."""


class Holdings:
    """Blocks by their place (rank, offset), in the order in which they became visible.

    They are as many as there are places: a block that comes to a place replaces what was there.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], HeldBlock] = {}

    def add(self, blocks: Sequence[HeldBlock]) -> None:
        """Add blocks that have become visible."""
        for block in blocks:
            place = block.ref.rank, block.ref.offset
            self._blocks.pop(place, None)
            self._blocks[place] = block

    def remove(self, keys: Collection[int]) -> None:
        """Forget blocks that are removed for good."""
        gone = set(keys)
        self._blocks = {place: block for place, block in self._blocks.items() if block.key not in gone}

    def lose_rank(self, rank: int) -> None:
        """Forget what lies in the segment of a lost rank."""
        self._blocks = {place: block for place, block in self._blocks.items() if place[0] != rank}

    def pieces(self) -> Iterator[tuple[list[HeldBlock], bool]]:
        """Yield (some blocks, whether they are the last), at least once."""
        left = iter(self._blocks.values())
        count = max(1, -(-len(self._blocks) // PIECE))
        for number in range(1, count + 1):
            yield list(islice(left, PIECE)), number == count

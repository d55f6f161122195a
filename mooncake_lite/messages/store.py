"""Between the conductor and the store ranks: blocks to the SSD tier and back.

Each message of a store rank carries its epoch (see RankHello): what an earlier start of it sent is ignored.
Explained in docs/explain/lifecycle.md and docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

from typing import Literal

from mooncake_lite.messages.parts import BlockRef, Message


class TierIndex(Message, frozen=True):
    """Store -> conductor, at the start: what its SSD tier holds, hottest last (equal-length lists)."""

    keys: list[int]
    digests: list[int]
    last: bool
    epoch: int = 0


class SaveBlocks(Message, frozen=True):
    """Conductor -> store: these objects, its own or those of a rank that only lends, became visible; write
    them behind to the tier."""

    refs: list[BlockRef]
    keys: list[int]
    digests: list[int]
    checksums: list[list[int]]


class BlocksSaved(Message, frozen=True):
    """Store -> conductor: what became of blocks that were to be written behind.

    state   "written" to the open segment file, so the DRAM copy is no longer needed; "durable" in a sealed
            one; "dropped": not written (queue or disk full), so DRAM has the only copy; "bad": not written,
            because the bytes in DRAM are not those of put_end
    """

    keys: list[int]
    state: Literal["written", "durable", "dropped", "bad"]
    epoch: int = 0


class TierEvicted(Message, frozen=True):
    """Store -> conductor: these blocks had to leave the tier, which is full."""

    keys: list[int]
    epoch: int = 0


class RemoveBlocks(Message, frozen=True):
    """Conductor -> store: remove these keys from the tier for good; it need not have them."""

    keys: list[int]


class BlocksRemoved(Message, frozen=True):
    """Store -> conductor: these keys are no longer in the tier. for_good: no restart brings them back."""

    keys: list[int]
    for_good: bool
    epoch: int = 0


class LoadBlocks(Message, frozen=True):
    """Conductor -> store: read these keys from the tier into the objects allocated for them, which lie in one
    segment, the store rank's own or another's. number is positive."""

    number: int
    keys: list[int]
    digests: list[int]
    refs: list[BlockRef]


class BlocksLoaded(Message, frozen=True):
    """Store -> conductor: LoadBlocks is done.

    ok                false for a block that was bad (a miss, and counted) or that could not be moved
    checksums         those verified, by block
    problem           why it could not be finished, "" when it could
    may_still_write   bytes may still land in what is not ok
    """

    number: int
    ok: list[bool]
    checksums: list[list[int]]
    seconds: float
    problem: str = ""
    may_still_write: bool = False
    epoch: int = 0

    @classmethod
    def failed(cls, number: int, count: int, problem: str) -> BlocksLoaded:
        """None of `count` blocks can be told of."""
        return cls(number, [False] * count, [[]] * count, 0.0, problem)


class CopyBlocks(Message, frozen=True):
    """Conductor -> store: read these objects from their segments into yours, one to one."""

    number: int
    sources: list[BlockRef]
    targets: list[BlockRef]


class BlocksCopied(Message, frozen=True):
    """Store -> conductor: CopyBlocks has ended.

    checksums   of what arrived, per layer; empty for a block that did not
    writing     bytes may still land in the targets that did not arrive
    """

    number: int
    checksums: list[list[int]]
    writing: bool
    epoch: int = 0

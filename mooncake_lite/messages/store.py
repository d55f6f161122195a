"""Between the conductor and the store ranks: blocks to the SSD tier and back.

Explained in docs/lifecycle.md and docs/reference/hdf5-tier.md.
"""

from __future__ import annotations

from typing import Literal

from mooncake_lite.messages.parts import BlockRef, Message


class TierIndex(Message, frozen=True):
    """Store -> conductor, at the start: what its SSD tier holds, hottest last (equal-length lists)."""

    rank: int
    keys: list[int]
    digests: list[int]
    last: bool


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

    rank: int
    keys: list[int]
    state: Literal["written", "durable", "dropped", "bad"]


class TierEvicted(Message, frozen=True):
    """Store -> conductor: these blocks had to leave the tier, which is full."""

    rank: int
    keys: list[int]


class RemoveBlocks(Message, frozen=True):
    """Conductor -> store: remove these keys from the tier for good; it need not have them."""

    keys: list[int]


class BlocksRemoved(Message, frozen=True):
    """Store -> conductor: these keys are no longer in the tier. for_good: no restart brings them back."""

    rank: int
    keys: list[int]
    for_good: bool


class LoadBlocks(Message, frozen=True):
    """Conductor -> store: read these keys from the tier into the objects allocated for them, which lie in one
    segment, the store rank's own or another's. number is positive."""

    number: int
    keys: list[int]
    digests: list[int]
    refs: list[BlockRef]


class BlocksLoaded(Message, frozen=True):
    """Store -> conductor: LoadBlocks is done; `ok[i]` false where a block was bad (a miss, and counted).
    checksums[i] are those verified for block i. problem: why it could not be finished; bytes may then still
    arrive in what is not ok."""

    number: int
    ok: list[bool]
    checksums: list[list[int]]
    seconds: float
    problem: str = ""

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
    writing     a transfer failed, so that bytes may still arrive: the ranges stay unused
    """

    number: int
    checksums: list[list[int]]
    writing: bool

"""Lent blocks: how a store rank saves, loads and checks blocks in the segments of compute ranks.

Used by the store role, from its one thread. A prefill or decode rank computes and has no tier, so the store
rank that keeps its blocks moves them through memory of its own, a few at a time.
See docs/explain/lifecycle.md.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from mooncake_lite.messages import BlockRef, BlocksLoaded, CheckBlocks, LoadBlocks
from store.layout import BlockLayout
from store.ssd.tier_reader import Read
from transport.engine import Batch, Transfer, TransferEngine

Submit = Callable[[int, int, Sequence[int], np.ndarray], bool]
"""`TierWriter.submit`: key, digest, checksums, the block."""

Order = Callable[[int, list[Read]], None]
"""Reads blocks from the tier under a number, and then calls `LentLoads.arrived`."""


def _moves(
    op: Literal["read", "write"], refs: Sequence[BlockRef], blocks: Sequence[np.ndarray]
) -> list[Transfer]:
    return [Transfer(op, block, ref.rank, 0, ref.offset, ref.nbytes) for ref, block in zip(refs, blocks)]


class _Save(NamedTuple):
    ref: BlockRef
    key: int
    digest: int
    checksums: list[int]


class LentSaves:
    """Saves lent blocks: DRAM of another rank -> a slot of this one -> the tier's writer.

        _waiting    oldest first; the directory bounds them: they cannot be evicted until they are saved
        _arriving   read together: what, into which slots
        _written    key -> slot, from submit until the writer has reported the key

    Invariant: every slot is free, arriving or being written.
    """

    def __init__(self, transfers: TransferEngine, layout: BlockLayout, slots: int, submit: Submit) -> None:
        self._transfers, self._submit = transfers, submit
        self._memory = np.empty((slots, layout.nbytes), np.uint8)  # costs nothing until it is used
        self._free = list(range(slots))
        self._waiting: deque[_Save] = deque()
        self._arriving: list[tuple[list[_Save], list[int], Batch]] = []
        self._written: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        """Tell whether transfers are under way."""
        return bool(self._arriving)

    def drop(self) -> None:
        """Forget what waits. Blocks that arrive already are saved."""
        self._waiting.clear()

    @property
    def left(self) -> int:
        """Return the number of blocks that the writer does not have yet."""
        return len(self._waiting) + sum(len(items) for items, _, _ in self._arriving)

    def add(self, ref: BlockRef, key: int, digest: int, checksums: list[int]) -> None:
        """Add a block to the queue of saves."""
        self._waiting.append(_Save(ref, key, digest, checksums))

    def reported(self, keys: Sequence[int]) -> None:
        """Free the slots of blocks that the writer has reported."""
        self._free += [self._written.pop(key) for key in keys if key in self._written]

    def advance(self, *, newest_first: bool = False) -> list[int]:
        """Begin and end transfers without waiting. Returns the keys of blocks that cannot be saved."""
        lost: list[int] = []
        for job in [job for job in self._arriving if job[2].poll()]:
            self._arriving.remove(job)
            lost += self._land(*job)
        count = min(len(self._free), len(self._waiting))
        if count:
            take = self._waiting.pop if newest_first else self._waiting.popleft
            items = [take() for _ in range(count)]
            slots = [self._free.pop() for _ in items]
            moves = _moves("read", [item.ref for item in items], [self._memory[slot] for slot in slots])
            self._arriving.append((items, slots, self._transfers.submit(moves)))
        return lost

    def _land(self, items: list[_Save], slots: list[int], batch: Batch) -> list[int]:
        lost = []
        for index, (item, slot) in enumerate(zip(items, slots)):
            arrived = index not in batch.failures
            if arrived and self._submit(item.key, item.digest, item.checksums, self._memory[slot]):
                self._written[item.key] = slot
            else:
                self._free.append(slot)
                lost.append(item.key)
        return lost

    def check(self) -> None:
        """Assert the invariant (tests)."""
        used = [
            *self._free,
            *self._written.values(),
            *(slot for _, slots, _ in self._arriving for slot in slots),
        ]
        assert sorted(used) == list(range(len(self._memory)))


class LentLoads:
    """Loads lent blocks: the tier -> slots of this rank -> DRAM of another rank. One order at a time.

    _orders    the first one is under way
    _piece     its blocks in the slots: the first one and the one after the last
    _sums      what was verified so far, None where the tier has no good block
    """

    def __init__(
        self,
        sender: Callable[[], tuple[int, int]],
        transfers: TransferEngine,
        layout: BlockLayout,
        slots: int,
        order: Order,
    ) -> None:
        """sender: number and epoch of this rank, for answers."""
        self._sender, self._transfers, self._order = sender, transfers, order
        self._memory = np.empty((slots, layout.nbytes), np.uint8)
        self._orders: deque[LoadBlocks] = deque()
        self._piece = (0, 0)
        self._sums: list[list[int] | None] = []
        self._written: list[int] = []
        self._flying: Batch | None = None
        self._began, self._dropped = 0.0, ""

    @property
    def busy(self) -> bool:
        """Tell whether transfers are under way."""
        return self._flying is not None

    @property
    def left(self) -> int:
        """Return the number of orders that have not ended."""
        return len(self._orders)

    def drop(self) -> None:
        """Drop all orders. The piece under way ends first."""
        while len(self._orders) > 1:
            self._orders.pop()
        self._dropped = "a new conductor does not know this order" if self._orders else ""

    def add(self, message: LoadBlocks) -> None:
        """Add an order. Its number is positive; orders to the tier have negative numbers."""
        self._orders.append(message)
        if len(self._orders) == 1:
            self._begin()

    def arrived(self, sums: list[list[int] | None]) -> BlocksLoaded | None:
        """Write the blocks that the tier has read to their places. Returns the answer of a finished order."""
        first, end = self._piece
        self._sums += sums
        self._written = [index for index in range(first, end) if self._sums[index] is not None]
        if not self._written or self._dropped:
            return self._next(self._dropped)
        refs = [self._orders[0].refs[index] for index in self._written]
        blocks = [self._memory[index - first] for index in self._written]
        self._flying = self._transfers.submit(_moves("write", refs, blocks))
        return self.advance()

    def advance(self) -> BlocksLoaded | None:
        """End a finished transfer. Returns the answer of a finished order."""
        if self._flying is None or not self._flying.poll():
            return None
        batch, self._flying = self._flying, None
        failures = batch.failures
        for at in failures:
            self._sums[self._written[at]] = None
        problem = str(failures[min(failures)]) if failures else self._dropped
        return self._next(problem, bool(batch.may_still_land))

    def _begin(self) -> None:
        self._began, self._sums = time.perf_counter(), []
        self._read(0)

    def _read(self, first: int) -> None:
        message = self._orders[0]
        self._piece = (first, min(first + len(self._memory), len(message.refs)))
        reads = [
            Read(message.keys[index], message.digests[index], self._memory[index - first])
            for index in range(*self._piece)
        ]
        self._order(-message.number, reads)

    def _next(self, problem: str = "", may_still_write: bool = False) -> BlocksLoaded | None:
        """Read the next piece, or end the order after its last piece or its first failure."""
        message, end = self._orders[0], self._piece[1]
        if end < len(message.refs) and not problem:
            self._read(end)
            return None
        sums = self._sums + [None] * (len(message.refs) - len(self._sums))
        self._orders.popleft()
        self._dropped = ""
        seconds = time.perf_counter() - self._began
        if self._orders:
            self._begin()
        ok, found = [s is not None for s in sums], [s or [] for s in sums]
        return BlocksLoaded(*self._sender(), message.number, ok, found, seconds, problem, may_still_write)


class LentCheck:
    """Compares lent blocks with their checksums, one at a time.

    good   by block, so far;  problem   why it cannot go on, "" while it can;  block   the newest, (nbytes,)
    """

    def __init__(self, transfers: TransferEngine, layout: BlockLayout, message: CheckBlocks) -> None:
        self.message = message
        self.good: list[bool] = []
        self.problem = ""
        self.block = np.empty(layout.nbytes, np.uint8)
        self._transfers, self._layout = transfers, layout
        self._flying: Batch | None = None

    def advance(self) -> bool:
        """Compare blocks without waiting. Returns whether all are compared."""
        refs = self.message.refs
        while not self.problem and len(self.good) < len(refs):
            if self._flying is None:
                ref = refs[len(self.good)]
                self._flying = self._transfers.submit(_moves("read", [ref], [self.block]))
            if not self._flying.poll():
                return False
            failures, self._flying = self._flying.failures, None
            if failures:
                self.problem = f"a block cannot be read: {failures[0]}"
            else:
                sums = self.message.checksums[len(self.good)]
                self.good.append(self._layout.checksums(self.block) == sums)
        return True

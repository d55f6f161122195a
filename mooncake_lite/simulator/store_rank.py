"""A model of a store rank: an SSD tier behind its DRAM, and copies of blocks.

Used by `world.py`. The tier follows `store.ssd.tier_writer`: a block is written to an open file, durable when
the file is sealed, and evicted when the tier is full. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.ranks.computing.machine import NewTerm
from mooncake_lite.ranks.store.holdings import Holdings
from mooncake_lite.simulator.clock import Action
from mooncake_lite.simulator.hardware import WORK_S
from mooncake_lite.simulator.surroundings import Surroundings
from store.objects import BlockRef

SEAL_BLOCKS = 4
SEAL_S = 2.0


class StoreModel:
    """A store rank.

    capacity   blocks that its tier may hold; 0: it has none
    term       number of the latest conductor that it knows
    _queue     key -> (its range in DRAM, checksums): to be written behind
    _open      key -> bytes: in the file that is not sealed yet
    _durable   key -> bytes: what the tier serves, oldest first
    """

    def __init__(self, number: int, capacity: int, world: Surroundings) -> None:
        self.number, self.capacity, self._world = number, capacity, world
        self.term = 0
        self._queue: dict[int, tuple[BlockRef, list[int]]] = {}
        self._open: dict[int, Any] = {}
        self._durable: dict[int, Any] = {}
        self._sealing = False
        self._holds = Holdings()
        self._digests: dict[int, int] = {}

    def on(self, order: Any) -> None:
        """Carry out an order."""
        hardware = self._world.hardware
        match order:
            case NewTerm(term):
                self._join(term)
            case fx.HoldBlocks():
                self._holds.add(order.blocks)
            case fx.SaveBlocks():
                self._save(order)
            case fx.LoadBlocks():
                read = partial(hardware.load, self.number, sum(ref.nbytes for ref in order.refs))
                self._later(read, partial(self._load, order, self._world.clock.now))
            case fx.CopyBlocks():
                read = partial(hardware.copy, self.number, order.sources)
                self._later(read, partial(self._copy, order))
            case fx.CheckBlocks():
                self._later(self._work, partial(self._check, order))
            case fx.RemoveBlocks():
                self._holds.remove(order.keys)
                self._work(partial(self._remove, order.keys))
            case fx.CompactTier():
                pass
            case _:
                raise AssertionError(f"a store rank gets {order}")

    def _join(self, term: int) -> None:
        """Drop all orders, and tell a new conductor what this rank holds."""
        self.term, world = term, self._world
        self._queue.clear()
        world.answer(world.shape.hello(self.number, term))
        if self.capacity:
            digests = [self._digests[key] for key in self._durable]
            world.answer(ev.TierIndexed(self.number, term, list(self._durable), digests, True))
        for blocks, last in self._holds.pieces():
            world.answer(ev.Inventory(self.number, term, blocks, last))

    def _work(self, done: Action) -> None:
        self._world.clock.after(self._world.dice.random() * WORK_S, done)

    def _later(self, work: Callable[[Action], None], act: Action) -> None:
        """Do work, and then act, unless the rank has died meanwhile."""
        self._world.skip(1)
        work(lambda: None if self.number in self._world.dead else act())

    # ------------------------------------------------------------------------------ saves

    def _save(self, order: fx.SaveBlocks) -> None:
        if not self.capacity:
            self._report(order.keys, "dropped")
            return
        self._digests.update(zip(order.keys, order.digests))
        dropped, queued, nbytes = [], [], 0
        for ref, key, sums in zip(order.refs, order.keys, order.checksums, strict=True):
            if key in self._queue or self._drops():
                dropped.append(key)
            else:
                self._queue[key] = ref, sums
                queued.append(key)
                nbytes += ref.nbytes
        self._report(dropped, "dropped")
        if queued:
            self._world.hardware.save(self.number, nbytes, partial(self._write, queued))

    def _drops(self) -> bool:
        """Tell whether a block, or a file, does not come to the disk."""
        self._world.skip(1)
        return False

    def _write(self, keys: list[int]) -> None:
        """Write keys to the open file that are still queued, and whose bytes are those that were put."""
        written, bad = [], []
        for key in keys:
            if key not in self._queue:
                continue
            ref, sums = self._queue.pop(key)
            content = self._in_dram(ref)  # an earlier save of the key may have freed the range
            if content is not None and self._world.bytes.sums(content) == sums:
                self._open[key] = content
                written.append(key)
            else:
                bad.append(key)
        self._report(written, "written")
        self._report(bad, "bad")
        if len(self._open) >= SEAL_BLOCKS:
            self._seal()
        elif self._open and not self._sealing:
            self._sealing = True
            self._world.clock.after(SEAL_S, self._seal)

    def _in_dram(self, ref: BlockRef) -> Any:
        """Return the bytes of a block that is saved."""
        self._world.skip(1)
        return self._world.bytes.find(ref)

    def _seal(self) -> None:
        """Make the blocks in the open file durable, or lose them to a full disk."""
        self._sealing = False
        keys = list(self._open)
        if self._drops():
            self._report(keys, "dropped")
        else:
            self._durable.update(self._open)
            self._report(keys, "durable")
        self._open.clear()
        evicted = []
        while len(self._durable) > self.capacity:
            evicted.append(next(iter(self._durable)))
            del self._durable[evicted[-1]]
        if evicted:
            self._world.answer(ev.TierEvicted(self.number, self.term, evicted))

    def _report(self, keys: list[int], state: Literal["written", "durable", "dropped", "bad"]) -> None:
        if keys:
            self._world.answer(ev.BlocksSaved(self.number, self.term, keys, state))

    def _remove(self, keys: list[int]) -> None:
        """Take keys out of the tier, and drop what waits to be written under them."""
        dropped = [key for key in keys if self._queue.pop(key, None) or self._open.pop(key, None)]
        for key in keys:
            self._durable.pop(key, None)
        self._report(dropped, "dropped")
        for_good = self._world.dice.random() < 0.9
        self._world.answer(ev.BlocksRemoved(self.number, self.term, keys, for_good))

    # ------------------------------------------------------------------------------ reads and copies

    def _load(self, order: fx.LoadBlocks, began: float) -> None:
        """Read those blocks into DRAM that the tier still has."""
        found = [self._durable.get(key) for key in order.keys]
        self._world.skip(1 + len(found) - found.count(None))
        self._loaded(order, began, found)

    def _loaded(
        self, order: fx.LoadBlocks, began: float, found: Sequence[Any], problem: str = "",
        may_write: bool = False,
    ) -> None:  # fmt: skip
        """Tell what was read. may_write: bytes of a block that was not may still come."""
        sums, seconds = self._put(order.refs, found), self._world.clock.now - began
        ok = [one is not None for one in found]
        self._world.answer(
            ev.BlocksLoaded(self.number, self.term, order.number, ok, sums, seconds, problem, may_write)
        )

    def _copy(self, order: fx.CopyBlocks) -> None:
        """Read blocks of other ranks into this rank's segment."""
        found = [self._world.bytes.find(source) for source in order.sources]
        self._world.skip(len(found) - found.count(None))
        self._copied(order, found)

    def _copied(self, order: fx.CopyBlocks, found: Sequence[Any], may_write: bool = False) -> None:
        """Tell what was copied, as _loaded."""
        sums = self._put(order.targets, found)
        self._world.answer(ev.BlocksCopied(self.number, self.term, order.number, sums, may_write))

    def _check(self, order: fx.CheckBlocks, problem: str = "") -> None:
        """Compare blocks with their checksums."""
        found = [self._world.bytes.find(ref) for ref in order.refs]
        pairs = zip(found, order.checksums, strict=True)
        good = [one is not None and self._world.bytes.sums(one) == sums for one, sums in pairs]
        self._world.answer(ev.BlocksChecked(self.number, self.term, order.number, good, problem))

    def _put(self, refs: Sequence[BlockRef], found: Sequence[Any]) -> list[list[int]]:
        """Write blocks to DRAM, but None. Returns their checksums."""
        for ref, content in zip(refs, found, strict=True):
            if content is not None:
                self._world.bytes.write(ref, content)
        return [[] if content is None else self._world.bytes.sums(content) for content in found]

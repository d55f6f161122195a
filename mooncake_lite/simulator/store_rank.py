"""A model of a store rank: an SSD tier behind its DRAM, copies and checks of blocks.

Used by `world.py`. The tier follows `store.tier_writer`: a block is written to an open file, durable when the
file is sealed, and evicted when the tier is full. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.ranks.computing.machine import NewTerm
from mooncake_lite.ranks.store.holdings import Holdings
from mooncake_lite.simulator.clock import Action
from mooncake_lite.simulator.faults import SLOW_STORE_S
from mooncake_lite.simulator.hardware import WORK_S
from mooncake_lite.simulator.kv import Content
from mooncake_lite.simulator.surroundings import Surroundings
from mooncake_lite.simulator.workload import Block
from store.objects import BlockRef

SEAL_BLOCKS = 4
SEAL_S = 2.0


class StoreModel:
    """A store rank.

    capacity   blocks that its tier may hold; 0: it has none
    _queue     key -> (its range in DRAM, checksums): to be written behind
    _open      key -> content: in the file that is not sealed yet
    _durable   key -> content: what the tier serves, oldest first
    """

    def __init__(self, number: int, capacity: int, world: Surroundings) -> None:
        self.number = number
        self.capacity = capacity
        self._world = world
        self._queue: dict[int, tuple[BlockRef, list[int]]] = {}
        self._open: dict[int, Content] = {}
        self._durable: dict[int, Content] = {}
        self._sealing = False
        self.term = 0
        self._holds = Holdings()
        self._digests: dict[int, int] = {}

    def restart_with(self, blocks: Iterable[Block]) -> list[Block]:
        """Fill the tier with blocks of an earlier run, as many as fit, and return them."""
        kept = list(blocks)[: self.capacity]
        self._durable = {block.key: Content(block.kv) for block in kept}
        self._digests = {block.key: block.digest for block in kept}
        return kept

    def serves(self, key: int) -> bool:
        """Return whether the tier has this block in a sealed file."""
        return key in self._durable

    def on(self, order: fx.Order | NewTerm) -> None:
        """Carry out an order."""
        world = self._world
        match order:
            case NewTerm(term):
                self._join(term)
            case fx.HoldBlocks():
                self._holds.add(order.blocks)
            case fx.SaveBlocks():
                self._save(order)
            case fx.LoadBlocks():
                read = partial(world.hardware.load, self.number, sum(ref.nbytes for ref in order.refs))
                self._later(read, partial(self._load, order, world.clock.now))
            case fx.CopyBlocks():
                self._later(
                    partial(world.hardware.copy, self.number, order.sources), partial(self._copy, order)
                )
            case fx.CheckBlocks():
                self._later(self._work, lambda _: self._check(order))
            case fx.RemoveBlocks():
                self._holds.remove(order.keys)
                self._work(lambda: self._remove(order.keys))
            case fx.CompactTier():
                pass
            case _:
                raise AssertionError(f"a store rank gets {order}")

    def _join(self, term: int) -> None:
        """Drop all orders, and tell a new conductor what this rank holds."""
        self.term = term
        self._queue.clear()
        world = self._world
        world.answer(world.shape.hello(self.number, term))
        if self.capacity:
            digests = [self._digests[key] for key in self._durable]
            world.answer(ev.TierIndexed(self.number, term, list(self._durable), digests, True))
        for blocks, last in self._holds.pieces():
            world.answer(ev.Inventory(self.number, term, blocks, last))

    def _work(self, done: Action) -> None:
        self._world.clock.after(self._world.dice.random() * WORK_S, done)

    def _later(self, work: Callable[[Action], None], action: Callable[[bool], None]) -> None:
        """Do work, and then run an action. It is told whether the order was given up meanwhile."""
        world, dice, term = self._world, self._world.dice, self.term

        def act(slow: bool) -> None:
            if self.number not in world.dead and term == self.term:
                action(slow)

        if dice.random() < world.faults.slow_store:
            world.clock.after(dice.uniform(*SLOW_STORE_S), lambda: act(True))
        else:
            work(lambda: act(False))

    # ------------------------------------------------------------------------------ saves

    def _save(self, order: fx.SaveBlocks) -> None:
        world = self._world
        if not self.capacity:
            self._report(order.keys, "dropped")
            return
        self._digests.update(zip(order.keys, order.digests))
        dropped, queued, nbytes = [], [], 0
        for ref, key, sums in zip(order.refs, order.keys, order.checksums, strict=True):
            if key in self._queue or world.dice.random() < world.faults.save_dropped:
                dropped.append(key)
            else:
                self._queue[key] = ref, sums
                queued.append(key)
                nbytes += ref.nbytes
        self._report(dropped, "dropped")
        if queued:
            world.hardware.save(self.number, nbytes, partial(self._write, queued))

    def _write(self, keys: list[int]) -> None:
        """Write keys to the open file that are still queued, and whose bytes are those that were put."""
        memory = self._world.memory
        written, bad = [], []
        for key in keys:
            if key not in self._queue:
                continue
            ref, sums = self._queue.pop(key)
            if self._world.dice.random() < self._world.faults.dram_bad and memory.find(ref):
                memory.rot(ref)
            content = memory.find(ref)  # an earlier save of the key may have freed the range
            if content is not None and memory.sums(content) == sums:
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

    def _seal(self) -> None:
        """Make the blocks in the open file durable, or lose them to a full disk."""
        self._sealing = False
        keys = list(self._open)
        if self._world.dice.random() < self._world.faults.save_dropped:
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

    def _load(self, order: fx.LoadBlocks, began: float, slow: bool) -> None:
        """Read blocks of the tier into DRAM. A block is bad when it is missing or not as it was written."""
        world, memory = self._world, self._world.memory
        problem = "the disk does not answer" if world.dice.random() < world.faults.load_fails else ""
        ok: list[bool] = []
        checksums: list[list[int]] = []
        for key, ref in zip(order.keys, order.refs, strict=True):
            content = self._durable.get(key)
            if content is not None and world.dice.random() < world.faults.tier_bad:
                content = self._durable[key] = content._replace(rotten=True)
            if content is None or content.rotten or (problem and world.dice.random() < 0.5):
                ok.append(False)
                checksums.append([])
            else:
                ok.append(True)
                checksums.append(memory.sums(content))
                memory.write(ref, content)
        if all(ok):
            problem = ""
        may_still_write = bool(problem) and not slow and world.dice.random() < world.faults.may_still_write
        world.answer(
            ev.BlocksLoaded(
                self.number,
                self.term,
                order.number,
                ok,
                checksums,
                world.clock.now - began,
                problem,
                may_still_write,
            )
        )

    def _copy(self, order: fx.CopyBlocks, slow: bool) -> None:
        """Read blocks of other ranks into this rank's segment."""
        world, memory = self._world, self._world.memory
        checksums: list[list[int]] = []
        for source, target in zip(order.sources, order.targets, strict=True):
            content = memory.find(source)
            if content is None or world.dice.random() < world.faults.copy_fails:
                checksums.append([])
            else:
                memory.write(target, content)
                checksums.append(memory.sums(content))
        may_still_write = (
            not all(checksums) and not slow and world.dice.random() < world.faults.may_still_write
        )
        world.answer(ev.BlocksCopied(self.number, self.term, order.number, checksums, may_still_write))

    def _check(self, order: fx.CheckBlocks) -> None:
        """Compare blocks with their checksums."""
        world, memory = self._world, self._world.memory
        good = []
        for ref, sums in zip(order.refs, order.checksums, strict=True):
            content = memory.find(ref)
            good.append(content is not None and memory.sums(content) == sums)
        problem = "a block cannot be read" if world.dice.random() < world.faults.check_fails else ""
        world.answer(ev.BlocksChecked(self.number, self.term, order.number, good, problem))

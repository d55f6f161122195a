"""The ranks of the fault world: their KV is followed, their transfers fail, and they join new conductors.

Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from mooncake_lite import messages as m
from mooncake_lite.control import effects as fx
from mooncake_lite.control.request import client_id_of
from mooncake_lite.engine.emulated import FIRST, emulated_token
from mooncake_lite.ranks.computing.machine import Told
from mooncake_lite.simulator.computing_rank import SimulatedRank
from mooncake_lite.simulator.runner import FAILED, VirtualRunner, longer
from mooncake_lite.simulator.store_rank import StoreModel
from scheduler.instance import Fault, Result, Step, TransferEnded
from scheduler.instance.staging import HALVES
from scheduler.instance.step import ENGINE_ERROR, NO_TOKEN, Chunk, LayerLoad, WriteGroup, WritePut
from store.layout import check_of
from store.objects import BlockRef
from tests.worlds.faults import LATE_WRITE_S, SLOW_STORE_S
from tests.worlds.memory import NOTHING, Content
from tests.worlds.requests import VOCABULARY, digest_after

BAD = "other bytes"


class ExactRank(SimulatedRank):
    """One rank. held: blocks in its pages, as it has told the conductor."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.held: set[int] = set()

    def check_idle(self) -> None:
        """Assert that the rank has nothing left: every page, half and slot is free."""
        state = self.rank.state
        state.check()
        assert not state.busy, f"rank {self.number} has work left"
        assert not state.pages.held

    def _tell(self, told: Sequence[Told]) -> None:
        for message, _, _ in told:
            if isinstance(message, m.RankHello):
                self.held.clear()
            elif isinstance(message, m.PagesChanged):
                self.held.update(message.stored)
                self.held.difference_update(message.removed)
        super()._tell(told)


class ExactRunner(VirtualRunner):
    """The engine and the transfers of one rank.

    _halves, _slots   what the staging halves and the single slots hold
    _puts             number of a put -> its blocks
    _late_until       when the last bytes of a failed read may still come into a half
    _spoilt           halves of groups whose pass has failed: so does their write
    """

    def __init__(self, kv: ExactKV, number: int, world: Any, *calls: Any) -> None:
        super().__init__(number, world, *calls)
        self._kv, self._memory, self._dice, self._odds = kv, world.memory, world.dice, world.faults
        self._per_block = world.shape.layout.block_tokens // world.shape.page_tokens  # pages
        self._halves: list[list[Content]] = [[] for _ in range(HALVES)]
        self._slots, self._puts = dict[int, Content](), dict[int, list[Content]]()
        self._late_until = [0.0] * HALVES
        self._spoilt, self._faults = set[int](), list[Fault]()

    def begin(self, step: Step) -> float:
        """Begin a step, and return when its computing ends."""
        self._faults = []
        computed_at, failed = super().begin(step), {one.job for one in self._faults}
        if failed:
            self._spoilt.update(one.half for one in step.writes if one.behind and one.job in failed)
        return computed_at

    def cut(self) -> float:
        """End a leap with the pass under way. Returns when that ends."""
        time = super().cut()
        self._faults = self._faults if NO_TOKEN in self._tokens else []
        return time

    def end(self) -> Result:
        """Return the result of the step."""
        result = super().end()
        return replace(result, faults=self._faults) if self._faults else result

    # ------------------------------------------------------------------------------ bytes

    def _hold(self, step: Step) -> list[list[int]]:
        for land in step.lands:
            self._kv.put(land.pages, self._kept(land.half, self._halves[land.half][: land.count]))
        for save in step.saves:
            self._slots[save.slot] = self._kv.block(save.pages)
        for put in step.puts:
            self._puts[put.put] = [self._slots[slot] for slot in put.slots]
        for growth in (one for one in step.grow if one.copies is not None):
            self._kv.copy(growth.copies, growth.pages[0])
        return [self._memory.sums(self._slots[save.slot]) for save in step.saves]

    def _kept(self, half: int, blocks: list[Content]) -> list[Content]:
        """Return what a half holds of blocks: nothing while bytes of a failed read come into it."""
        return blocks if self._world.clock.now >= self._late_until[half] else [NOTHING] * len(blocks)

    def _found(self, places: Sequence[BlockRef]) -> tuple[list[Content], list[BlockRef]]:
        """Return what places hold, and those that have to be compared, and hold other bytes than were put."""
        found = [self._memory.find(place) or NOTHING for place in places]
        checks = [(place, check_of(self._memory.sums(block))) for place, block in zip(places, found)]
        return found, [place for place, check in checks if place.check not in (0, check)]

    def _fails_late(self, halves: Sequence[int]) -> bool:
        """Tell whether bytes of a failed read may come into its halves much later."""
        late = self._dice.random() < self._odds.may_still_write
        for half in halves if late else ():
            self._late_until[half] = self._world.clock.now + self._dice.random() * LATE_WRITE_S
        return late

    def _read(self, half: int, places: Sequence[BlockRef]) -> TransferEnded:
        source_lost = self._has_died(places) and self._dice.random() < 0.5
        if source_lost or self._dice.random() < self._odds.read_fails:
            self._halves[half] = [NOTHING] * len(places)
            return TransferEnded(half, FAILED, not source_lost and self._fails_late([half]))
        self._halves[half], bad = self._found(places)
        return TransferEnded(half, BAD if bad else "", bad=bad)

    def _read_ahead(self, load: LayerLoad) -> TransferEnded | None:
        found, bad = self._found(load.places)
        self._kv.put(load.pages, found)
        for half in load.halves:
            self._halves[half] = [NOTHING] * len(load.places)
        if self._has_died(load.places) or self._dice.random() < self._odds.read_fails:
            return TransferEnded(0, FAILED, self._fails_late(load.halves))
        return TransferEnded(0, BAD, bad=bad) if bad else None

    def _wrote(self, number: int, sent: WriteGroup | WritePut) -> TransferEnded:
        """End a write. One that has failed leaves some of its places as they were. One of no blocks fails."""
        blocks = self._puts.pop(number) if isinstance(sent, WritePut) else self._blocks(sent)
        fails = self._dice.random() < self._odds.write_fails or not blocks
        for place, block in zip(sent.places, blocks):
            if not (fails and self._dice.random() < 0.5):
                self._memory.write(place, block)
        if fails:
            return TransferEnded(number, FAILED, self._dice.random() < self._odds.may_still_write)
        return TransferEnded(number, sums=[self._memory.sums(block) for block in blocks])

    def _blocks(self, group: WriteGroup) -> list[Content]:
        """Return what the blocks of a group hold now, as late as may be; none if its pass has failed."""
        if group.half in self._spoilt:
            self._spoilt.remove(group.half)
            return []
        size = self._per_block
        found = [self._kv.block(group.pages[n * size : (n + 1) * size]) for n in range(len(group.places))]
        return self._kept(group.half, found)

    # ------------------------------------------------------------------------------ passes

    def _draw(self, chunks: Sequence[Chunk]) -> list[int]:
        return [token for chunk in chunks for token in self._tokens_of(chunk)]

    def _tokens_of(self, chunk: Chunk) -> list[int]:
        """Compute a chunk. One that cannot be computed lacks tokens, and its KV is wrong.

        Not in a pipeline: there the KV counts as computed before the last stage has drawn.
        """
        poison, rows = self._world.requests[client_id_of(chunk.job.request_id)].poison, chunk.rows
        if len(rows) > 1:
            if poison is not None and poison.code == ENGINE_ERROR and any(map(poison.is_in, rows)):
                return self._tokens_of(rows[0]) + [NO_TOKEN] * (len(rows) - 1)  # once more, without drafts
            return [token for row in rows for token in self._tokens_of(row)]
        if poison is None or not poison.is_in(chunk):
            return self._kv.compute(chunk)
        raises, wrong = poison.code == ENGINE_ERROR, VOCABULARY * (len(self._ranks) == 1)
        self._faults += [Fault(chunk.job, ENGINE_ERROR, "a pass over it fails")] * raises
        ids = [token + wrong for token in chunk.token_ids]
        drawn = zip(chunk.draws, self._kv.compute(replace(chunk, token_ids=ids)))
        return [NO_TOKEN if raises or draw.branch == poison.branch else token for draw, token in drawn]

    def _leap(self, step: Step) -> None:
        """Do the passes of a leap, until one of them draws a token that ends an answer, or none."""
        chunks, load, stops = step.chunks, self._load, step.chunks[0].draws[0].stop_ids
        for number in range(1, step.steps + 1):
            if number > 1:
                pages = {growth.job: growth.pages for at, growth in step.later if at == number}
                chunks, load = self._next_pass(chunks, pages), longer(load)
            drawn = self._pass(chunks, load)
            if NO_TOKEN in drawn or not stops.isdisjoint(drawn):
                return

    def _next_pass(self, chunks: Sequence[Chunk], pages: dict[Any, Sequence[int]]) -> list[Chunk]:
        """Return the chunks of the next pass. Each computes the token that the last pass drew."""
        found = []
        for chunk, token in zip(chunks, self._tokens[-len(chunks) :]):
            draw = replace(chunk.draws[0], answered=chunk.draws[0].answered + 1)
            held = (*chunk.pages, *pages.get(chunk.job, ()))
            found.append(replace(chunk, token_ids=[token], start=chunk.end, pages=held, draws=(draw,)))
        return found


class ExactKV:
    """Pages with the digests of their tokens, as in engine.EmulatedEngine.

    page_tokens, block_tokens   tokens per page, and per block of the pool
    """

    def __init__(self, num_pages: int, page_tokens: int, block_tokens: int) -> None:
        self._page_tokens, self._per_block = page_tokens, block_tokens // page_tokens
        self._pages = [[0] * page_tokens for _ in range(num_pages)]

    def compute(self, chunk: Chunk) -> list[int]:
        """Write the digests of a chunk. Returns a token for each draw, in their order."""
        size, pages, last = self._page_tokens, chunk.pages, FIRST
        if chunk.start:
            page, offset = divmod(chunk.start - 1, size)
            last = self._pages[pages[page]][offset]
        for position, token in enumerate(chunk.token_ids, chunk.start):
            last = digest_after(last, token)
            self._pages[pages[position // size]][position % size] = last
        return [emulated_token(last, draw, VOCABULARY) for draw in chunk.draws]

    def copy(self, source: int, target: int) -> None:
        """Copy the digests of a page."""
        self._pages[target] = self._pages[source].copy()

    def put(self, pages: Sequence[int], blocks: Sequence[Content]) -> None:
        """Copy the digests of blocks into pages."""
        size = self._page_tokens
        for index, page in enumerate(pages):
            block, part = divmod(index, self._per_block)
            digests = list(blocks[block].digests[part * size : (part + 1) * size])
            self._pages[page] = digests + [0] * (size - len(digests))

    def block(self, pages: Sequence[int]) -> Content:
        """Return the digests of a block."""
        return Content(tuple(digest for page in pages for digest in self._pages[page]))


class FaultyStore(StoreModel):
    """A store rank. _slow: the order that it carries out was given up meanwhile."""

    def __init__(self, number: int, capacity: int, world: Any) -> None:
        super().__init__(number, capacity, world)
        self._dice, self._faults, self._memory, self._slow = world.dice, world.faults, world.memory, False

    def restart_with(self, blocks: Sequence[tuple[Content, int]]) -> list[tuple[int, int]]:
        """Fill the tier with blocks of an earlier run, as many as fit. Returns their keys and digests."""
        self._durable = {block.key: block for block, _ in blocks[: self.capacity]}
        self._digests = {block.key: digest for block, digest in blocks[: self.capacity]}
        return list(self._digests.items())

    def serves(self, key: int) -> bool:
        """Return whether the tier has this block in a sealed file."""
        return key in self._durable

    def _later(self, work: Callable[[Any], None], act: Callable[[], None]) -> None:
        term = self.term

        def end(slow: bool) -> None:
            if self.number not in self._world.dead and term == self.term:
                self._slow = slow
                act()

        if self._dice.random() < self._faults.slow_store:
            self._world.clock.after(self._dice.uniform(*SLOW_STORE_S), partial(end, True))
        else:
            work(partial(end, False))

    def _drops(self) -> bool:
        return self._dice.random() < self._faults.save_dropped

    def _in_dram(self, ref: BlockRef) -> Content | None:
        if self._dice.random() < self._faults.dram_bad and self._memory.find(ref):
            self._memory.rot(ref)
        return self._memory.find(ref)

    def _load(self, order: fx.LoadBlocks, began: float) -> None:
        """Read blocks of the tier into DRAM. A block is bad when it is missing or not as it was written."""
        dice, faults = self._dice, self._faults
        problem = "the disk does not answer" if dice.random() < faults.load_fails else ""
        found: list[Content | None] = []
        for key in order.keys:
            content = self._durable.get(key)
            if content is not None and dice.random() < faults.tier_bad:
                content = self._durable[key] = content._replace(rotten=True)
            is_bad = content is None or content.rotten or (problem and dice.random() < 0.5)
            found.append(None if is_bad else content)
        problem = problem if None in found else ""
        self._loaded(order, began, found, problem, bool(problem) and self._may_still_write())

    def _copy(self, order: fx.CopyBlocks) -> None:
        found = [self._memory.find(source) for source in order.sources]
        found = [one and (None if self._dice.random() < self._faults.copy_fails else one) for one in found]
        self._copied(order, found, None in found and self._may_still_write())

    def _may_still_write(self) -> bool:
        return not self._slow and self._dice.random() < self._faults.may_still_write

    def _check(self, order: fx.CheckBlocks) -> None:
        fails = self._dice.random() < self._faults.check_fails
        super()._check(order, "a block cannot be read" if fails else "")

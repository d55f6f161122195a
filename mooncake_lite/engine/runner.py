"""The runner: has an engine compute the chunks of a step, and moves blocks over the transport.

Called by the loop of the compute role and by `mooncake-lite generate`. It decides nothing: the step names
every page, half and slot that it touches. Explained in docs/explain/lifecycle.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.by_layers import Incoming, LayersLost, MovingHook, Outgoing
from mooncake_lite.engine.contract import ComputeEngine, Drawn, OnMoved
from mooncake_lite.engine.flights import Flights, Part
from mooncake_lite.engine.isolation import HookOf, Isolation, Passed
from mooncake_lite.engine.staging import StagingBlocks
from mooncake_lite.messages import Logprobs
from scheduler.instance import Result, Step, TransferEnded
from scheduler.instance.step import Chunk, WriteGroup

if TYPE_CHECKING:
    import numpy as np

    from transport.engine import TransferEngine

Compute = Callable[..., tuple[list[Drawn], list[list[Logprobs]]]]
"""(chunks, hook) -> what ComputeEngine.compute returns."""

WAIT_S = 0.0002
"""How long a step lasts that only waits for transfers: they get the core meanwhile."""


class Runner:
    """Carries out the steps of one rank.

    staging, transfers   None where no block is moved
    compute              in place of the engine's: of a rank that does not compute alone
    part                 that it has of each block; None: all
    _moves               whether blocks are moved. Only then it has staging memory, transfers and flights
    _copying             half -> its group, and the checksums that the copying thread will return
    _numbers, _of_slot   half -> numbers of the blocks that it reads in their sequence; slot -> of its block
    _leaving             half -> the end of a group that leaves by layers, from the same thread
    """

    def __init__(
        self,
        engine: ComputeEngine,
        staging: StagingBlocks | None = None,
        transfers: TransferEngine | None = None,
        compute: Compute | None = None,
        part: Part | None = None,
    ) -> None:
        self.engine = engine
        self._part, self._computes, self._isolation = part, compute, Isolation(engine)
        self._copier = ThreadPoolExecutor(1, "copier")
        self._copying: dict[int, tuple[WriteGroup, Future[list[list[int]]]]] = {}
        self._numbers, self._of_slot = dict[int, range](), dict[int, int]()
        self._leaving: dict[int, Future[TransferEnded]] = {}
        self._waited_s = 0.0  # for layers, in the pass under way
        self._moves = False
        if transfers is not None and staging is not None:
            self._moves, self._staging, self._transfers = True, staging, transfers
            self._halves, self._puts = (Flights(transfers, staging.layout, part) for _ in range(2))

    def run(self, step: Step, moved: OnMoved | None = None) -> Result:
        """Do the parts of a step, in the order of its fields. It does not wait for transfers to end.

        moved   called with the transfers of halves that have ended while chunks are computed
        """
        saved = self._move(step) if self._moves else []
        copies = [growth for growth in step.grow if growth.copies is not None]
        if copies:
            targets = [growth.pages[0] for growth in copies]
            self.engine.copy_pages([growth.copies for growth in copies if growth.copies is not None], targets)
        began = time.perf_counter()
        lost, self._waited_s = None, 0.0
        try:
            drawn, scores, faults = self._compute(step, moved) if step.chunks else ([], [], [])
        except LayersLost as error:
            drawn, scores, faults, lost = [], [], [], error.ended
        compute_s = time.perf_counter() - began - self._waited_s
        tokens, logprobs = [one.token for one in drawn], [one.logprobs for one in drawn]
        if not self._moves:
            return Result(step, tokens, compute_s=compute_s, logprobs=logprobs, scores=scores, faults=faults)
        if step.only_waits:
            self._wait()
        halves, puts = self._ended(), self._puts.ended()
        return Result(
            step, tokens, saved, halves, puts, compute_s, logprobs, scores, lost=lost, faults=faults
        )

    def _compute(self, step: Step, moved: OnMoved | None) -> Passed:
        """Do the pass. Raises LayersLost when its prefix does not come."""
        if not self._moves:
            return self._pass(step.chunks, lambda chunks: None)
        staging, transfers = self._staging, self._transfers
        incoming, behind = None, list[Outgoing]()
        for group in step.writes:
            if group.behind:
                behind.append(Outgoing(self.engine, staging, transfers, group))
                self._leaving[group.half] = self._copier.submit(behind[-1].run)
        try:
            if step.ahead is not None:
                incoming = Incoming(self.engine, staging, transfers, step.ahead)
            if not (self._halves.flying or self._copying or self._leaving or incoming):
                return self._pass(step.chunks, lambda chunks: None)

            def hook_of(chunks: Seq[Chunk]) -> MovingHook:
                jobs = {chunk.job for chunk in chunks}
                comes = incoming if step.ahead is not None and step.ahead.job in jobs else None
                leave = [one for one in behind if one.job in jobs]
                return MovingHook(partial(self._look, moved), comes, leave)

            return self._pass(step.chunks, hook_of)
        except BaseException:
            for one in behind:
                one.abort()
            raise
        finally:
            self._waited_s = incoming.waited_s if incoming is not None else 0.0

    def _pass(self, chunks: Seq[Chunk], hook_of: HookOf) -> Passed:
        """Compute chunks. With others, what raises ends the rank: they have KV that it lacks."""
        if self._computes is not None:
            return *self._computes(chunks, hook_of(chunks)), []
        return self._isolation.compute(chunks, hook_of)

    @property
    def is_moving(self) -> bool:
        """Tell whether blocks of a half or of a put are on their way."""
        return self._moves and (bool(self._copying) or self._halves.flying or self._puts.flying)

    def close(self) -> None:
        """End the copying thread, before the staging memory goes."""
        self._copier.shutdown(cancel_futures=True)

    def _wait(self) -> None:
        """Wait for a copy or a transfer, for WAIT_S at most. Copies of a transfer are done meanwhile."""
        if self._copying or self._leaving:
            futures: list[Future[Any]] = [future for _, future in self._copying.values()]
            wait([*futures, *self._leaving.values()], WAIT_S, return_when=FIRST_COMPLETED)
        elif not self._halves.help(WAIT_S) and not self._puts.help(WAIT_S):
            time.sleep(WAIT_S)

    def _ended(self) -> list[TransferEnded]:
        """Begin the transfers of groups that have been copied, and return those of halves that have ended."""
        for half, (group, future) in list(self._copying.items()):
            if future.done():
                del self._copying[half]
                blocks, label = self._staging.half(half, len(group.places)), ("store KV", group.job[0])
                places, own = self._own(group.numbers, group.places, blocks)
                self._halves.begin(half, "write", places, own, label, future.result())
        gone = [half for half, future in self._leaving.items() if future.done()]
        return [*self._halves.ended(), *(self._leaving.pop(half).result() for half in gone)]

    def _look(self, moved: OnMoved | None) -> None:
        """Tell of transfers of halves that have ended."""
        if moved is not None and (ended := self._ended()):
            moved(ended)

    def _move(self, step: Step) -> list[list[int]]:
        """Copy blocks within the rank and begin transfers. Returns checksums of `saves`."""
        staging, halves, puts = self._staging, self._halves, self._puts
        for read in step.reads:
            numbers = self._numbers[read.half] = range(read.first, read.first + len(read.places))
            half = staging.half(read.half, len(read.places))
            halves.begin(read.half, "read", *self._own(numbers, read.places, half), ("load KV", read.job[0]))
        for land in step.lands:
            blocks = staging.half(land.half, land.count)
            self._copy(self.engine.load_blocks, self._numbers[land.half], land.pages, blocks)
        for group in step.writes:
            if group.behind:
                continue
            self._copying[group.half] = group, self._copier.submit(self._copy_out, group)
        saved = []
        for save in step.saves:
            block, self._of_slot[save.slot] = staging.slot(save.slot), save.index
            self._copy(self.engine.store_blocks, [save.index], save.pages, block)
            saved += self._sums(block)
        for put in step.puts:
            own = [n for n, slot in enumerate(put.slots) if self._owns(self._of_slot[slot])]
            slots = [staging.slot(put.slots[n]) for n in own]
            puts.begin(put.put, "write", [put.places[n] for n in own], slots, ("put decoded blocks", ""))
        return saved

    def _copy_out(self, group: WriteGroup) -> list[list[int]]:
        """Copy a group from its pages into its half. Returns the checksums of its blocks.

        Done by the copying thread, beside a forward pass that writes other pages.
        """
        blocks = self._staging.half(group.half, len(group.places))
        self._copy(self.engine.store_blocks, group.numbers, group.pages, blocks)
        return self._sums(blocks)

    def _owns(self, block: int) -> bool:
        """Tell whether this rank has a part of a block. block: its number in its sequence."""
        return self._part is None or self._part.owns(block)

    def _own(
        self, numbers: Seq[int], places: Seq[Any], blocks: np.ndarray
    ) -> tuple[Seq[Any], Seq[np.ndarray]]:
        """Return those of a group of blocks that this rank has a part of. numbers: in their sequence."""
        if self._part is None:
            return places, list(blocks)
        own = [n for n, number in enumerate(numbers) if self._owns(number)]
        return [places[n] for n in own], [blocks[n] for n in own]

    def _copy(
        self, copy: Callable[..., None], numbers: Seq[int], pages: Seq[int], blocks: np.ndarray
    ) -> None:
        """Copy a group of blocks between pages and staging memory, all at once if this rank has them all."""
        own = [n for n, number in enumerate(numbers) if self._owns(number)]
        if self._part is None or len(own) == len(blocks):
            copy(pages, blocks)
            return
        size = self._staging.layout.block_tokens // PAGE_TOKENS
        for n in own:
            copy(pages[n * size : (n + 1) * size], blocks[n : n + 1])

    def _sums(self, blocks: np.ndarray) -> list[list[int]]:
        """Return the checksums of blocks; nothing of parts for which the first rank makes them."""
        sums = self._part is None or self._part.sums
        return [self._staging.layout.checksums(block) if sums else [] for block in blocks]

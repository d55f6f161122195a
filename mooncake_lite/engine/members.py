"""Several ranks as one instance: the first one has the planner, and tells the others what to do.

Used by `ranks/computing`. Each rank does what it is told after all that it was told before, with its own part
of each page and block. What the ranks exchange within a pass is another matter: hidden states in a pipeline
(`pipeline.py`), sums in lockstep (`transport.exchange`). Explained in docs/explain/several-ranks.md.

    first rank   step -> tell the others -> own part -> join the ends of all parts -> planner
    others               hear -> own part -> report ends
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from mooncake_lite.engine.contract import OnMoved
from mooncake_lite.engine.flights import BAD, TRANSFER_LIMIT_S, Part
from mooncake_lite.engine.runner import Runner
from mooncake_lite.engine.telling import orders_of
from mooncake_lite.messages import BlockRef
from mooncake_lite.messages.members import Dismissed, LateTokens, MemberChunk, MemberStep, PartEnded
from mooncake_lite.model.shares import Share
from scheduler.instance import JobId, Late, Result, Step, TransferEnded
from store.layout import BlockLayout, check_of
from transport.bulk.batch import Transfer
from transport.errors import TransferError

if TYPE_CHECKING:
    from transport.engine import TransferEngine

WAIT_S = 0.002
"""Longest wait for messages of a first rank that has nothing else to do."""

SILENCE_LIMIT_S = 600.0
"""Longest time without a report while one is due. Any value works that is far above the time of a pass."""

Moving = tuple[bool, int]
"""(whether it is a put, number): of a transfer."""

SumsOf = Callable[[Seq[TransferEnded], Seq[BlockRef]], list[list[int]]]
"""(ends of all parts of a transfer, its places) -> the checksums of each of these blocks."""


class Peers:
    """What one rank hears from the others of its instance, and how it tells them something.

    ranks     of the instance, the first one first; number: of this one
    receive   (seconds) -> messages of the others; tell: (number, message)
    steps     that the first rank has told and that have not begun
    ended     what the others have reported
    dismissed whether the first rank has said that no step comes any more
    """

    def __init__(
        self,
        ranks: Seq[int],
        number: int,
        receive: Callable[[float], Iterable[Any]],
        tell: Callable[[int, Any], object],
    ) -> None:
        self.ranks, self.number, self.tell, self._receive = ranks, number, tell, receive
        self.steps, self.ended = deque[MemberStep](), deque[PartEnded | LateTokens]()
        self.dismissed = False
        self._chunks: list[MemberChunk] = []  # of a step that has not come as a whole

    def look(self, wait_s: float = 0.0) -> None:
        """Take the messages that have come. Waits wait_s at most."""
        for message in self._receive(wait_s):
            self.hear(message)

    def hear(self, message: Any) -> None:
        """Take a message."""
        match message:
            case MemberStep():
                self._chunks += message.chunks
                if not message.more:
                    self.steps.append(replace(message, chunks=self._chunks))
                    self._chunks = []
            case PartEnded() | LateTokens():
                self.ended.append(message)
            case Dismissed():
                self.dismissed = True

    @property
    def can_begin(self) -> bool:
        """Tell whether there is a next step, and nothing that it needs has still to come."""
        return bool(self.steps)

    def next_step(self) -> MemberStep | None:
        """Take out the next step, if it can begin."""
        return self.steps.popleft() if self.can_begin else None

    def tell_others(self, message: Any) -> None:
        """Send to all others."""
        for number in range(len(self.ranks)):
            if number != self.number:
                self.tell(number, message)

    def leave(self) -> None:
        """End: a first rank dismisses the others."""
        if not self.number:
            self.tell_others(Dismissed())


class Leader:
    """The runner of a first rank: tells the others what it does, and the planner what all have done.

    sums_of   of blocks, when all parts of a transfer have ended
    on_look   is given what a pass has to call now and then, so that ends are told while it goes on
    late      tokens are reported by the last rank, as of a pipeline

    _parts    transfer -> the ends of its parts, by rank; _moves: whether it reads, and its places
    _puts     that have ended, until the end of the step
    _due      transfers, and jobs, of which not all have reported; heard_at: the last report
    """

    def __init__(
        self,
        runner: Runner,
        peers: Peers,
        sums_of: SumsOf,
        on_look: Callable[[Callable[[], object]], object] = lambda look: None,
        *,
        late: bool = False,
    ) -> None:
        self._runner, self._peers, self._sums_of = runner, peers, sums_of
        self._on_look, self._is_late = on_look, late
        self._parts: dict[Moving, dict[int, TransferEnded]] = {}
        self._moves: dict[Moving, tuple[bool, Seq[BlockRef]]] = {}
        self._puts: list[TransferEnded] = []
        self._due: set[Moving | JobId] = set()
        self._heard_at = time.monotonic()

    def run(self, step: Step, moved: OnMoved | None = None) -> Result:
        """Do this rank's part of a step, and have the others do theirs. See Runner.run.

        Raises RuntimeError when they do not report for SILENCE_LIMIT_S.
        """
        moves: dict[Moving, tuple[bool, Seq[BlockRef]]] = {}
        moves |= {(False, read.half): (True, read.places) for read in step.reads}
        moves |= {(False, write.half): (False, write.places) for write in step.writes}
        moves |= {(True, put.put): (False, put.places) for put in step.puts}
        self._moves |= moves
        self._due.update(moves, (one.job for one in step.chunks if self._is_late and one.draws))
        for order in orders_of(step):
            self._peers.tell_others(order)
        tell = None if moved is None else partial(self._tell, moved)
        self._on_look(self._peers.look if tell is None else partial(tell, ()))
        self._peers.look(WAIT_S if step.only_waits and not step.reads else 0.0)
        result = self._runner.run(step, tell)
        halves, late = self._all_told(result.halves, result.puts)
        puts, self._puts = self._puts, []
        return replace(result, step=step, halves=halves, puts=puts, late=late)

    def _tell(self, moved: OnMoved, own: Seq[TransferEnded], late: Seq[Late] = ()) -> None:
        """Tell of ends while a pass goes on."""
        self._peers.look()
        if any(told := self._all_told(own)):
            moved(*told)

    def _all_told(
        self, halves: Iterable[TransferEnded], puts: Iterable[TransferEnded] = ()
    ) -> tuple[list[TransferEnded], list[Late]]:
        """Return transfers of halves that have ended on all ranks, and late tokens. Keeps puts that have."""
        told = [PartEnded(0, False, one) for one in halves] + [PartEnded(0, True, one) for one in puts]
        late: list[Late] = []
        if self._peers.ended or not self._due:
            self._heard_at = time.monotonic()
        elif time.monotonic() - self._heard_at > SILENCE_LIMIT_S:
            raise RuntimeError(f"other ranks of the instance have reported nothing for {SILENCE_LIMIT_S:g} s")
        while self._peers.ended:
            report = self._peers.ended.popleft()
            if isinstance(report, PartEnded):
                told.append(report)
            else:
                late.append(Late(JobId(*report.job), report.tokens, report.logprobs, report.scores))
        whole = dict(self._whole(told))
        self._due.difference_update(whole, [one.job for one in late if one.tokens])
        self._puts += [one for (put, _), one in whole.items() if put]
        return [one for (put, _), one in whole.items() if not put], late

    def _whole(self, told: Iterable[PartEnded]) -> Iterator[tuple[Moving, TransferEnded]]:
        """Yield the transfers of which all ranks have done their part."""
        for report in told:
            moving = report.put, report.ended.number
            parts = self._parts.setdefault(moving, {})
            parts[report.member] = report.ended
            if len(parts) == len(self._peers.ranks):
                del self._parts[moving]
                in_order = [parts[number] for number in range(len(parts))]
                yield moving, self._joined(in_order, *self._moves.pop(moving, (False, ())))

    def _joined(self, parts: Seq[TransferEnded], reads: bool, places: Seq[BlockRef]) -> TransferEnded:
        """Join the ends of a transfer's parts. What was read is compared here."""
        number = parts[0].number
        problem = next((part.problem for part in parts if part.problem), "")
        if problem:
            return TransferEnded(number, problem, any(part.may_still_land for part in parts))
        asked = [ref for ref in places if ref.check] if reads else places
        try:
            sums = self._sums_of(parts, asked)
        except TransferError as error:
            return TransferEnded(number, str(error))
        if not reads:
            return TransferEnded(number, sums=sums)
        bad = [ref for ref, found in zip(asked, sums, strict=True) if check_of(found) != ref.check]
        return TransferEnded(number, BAD if bad else "", bad=bad)


def part_of(share: Share, layout: BlockLayout, unit_tokens: int) -> Part:
    """Return what a share has of each block: layers or heads of all, or all of some.

    layout   of whole blocks; unit_tokens: in which contexts are dealt out, if they are
    """
    if share.turns > 1:
        blocks = unit_tokens // layout.block_tokens
        return Part(
            lambda ref: [(ref.offset, ref.nbytes)],
            False,
            lambda block: block // blocks % share.turns == share.turn,
        )
    if share.members == 1:
        first, end = share.layers.start, share.layers.stop
        offsets = [(first * layout.layer_nbytes, (end - first) * layout.layer_nbytes)]
    else:
        heads = share.kv_heads.start, len(share.kv_heads)
        offsets = [one for layer in share.layers for one in layout.head_ranges(layer, *heads)]
    return Part(
        lambda ref: [(ref.offset + offset, nbytes) for offset, nbytes in offsets], sums=share.members == 1
    )


def chained(parts: Seq[TransferEnded], places: Seq[BlockRef]) -> list[list[int]]:
    """Return the checksums of blocks of which each rank has told those of its layers, first layers first."""
    return [list(itertools.chain(*some)) for some in zip(*(part.sums for part in parts))]


class WholeBlocks:
    """Makes the checksums of blocks where they lie: a rank has moved some of their heads, or some of them."""

    def __init__(self, transfers: TransferEngine, layout: BlockLayout) -> None:
        self._transfers, self._layout = transfers, layout

    def sums_of(self, parts: Seq[TransferEnded], places: Seq[BlockRef]) -> list[list[int]]:
        """Return the checksums of each block. Raises TransferError where a block cannot be read."""
        return [self._layout.checksums(self._block(ref)) for ref in places]

    def _block(self, ref: BlockRef) -> np.ndarray:
        """Return the bytes of a block: of a rank on this node without a copy."""
        there = self._transfers.mapped(ref.rank)
        if there is not None:
            return there[ref.offset : ref.offset + ref.nbytes]
        block = np.empty(ref.nbytes, np.uint8)
        read = Transfer("read", block, ref.rank, 0, ref.offset, ref.nbytes)
        self._transfers.submit([read], ("checksum", "")).wait(TRANSFER_LIMIT_S)
        return block

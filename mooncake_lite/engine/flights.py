"""Flights: the transfers of a rank that are under way, by the half or the put that they belong to.

Used by `runner.py`. No call waits for a transfer to end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from mooncake_lite.messages import BlockRef
from scheduler.instance import TransferEnded
from store.layout import BlockLayout, check_of
from transport.bulk.batch import Batch, Transfer
from transport.errors import TransferError

if TYPE_CHECKING:
    from transport.engine import TransferEngine

TRANSFER_LIMIT_S = 60.0
"""No batch of transfers takes longer on a working machine. After it the batch is cancelled."""

CANCEL_LIMIT_S = 10.0
"""A cancelled batch that has not ended after this is a broken rank: its buffers may not be used again."""


BAD = "the pool has other bytes than were put there"


@dataclass(slots=True)
class _Flight:
    """A batch that is under way.

    checked   places that are read, and where to, if they have to be compared
    sums      of the blocks that are written, where the planner wants them
    """

    batch: Batch
    deadline: float
    checked: list[tuple[BlockRef, np.ndarray]]
    sums: Seq[list[int]]
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank of an instance of several has of each block.

    ranges   (place of a block) -> (offset, bytes) of this part, in the order in which they lie in own blocks
    sums     it has whole layers, whose checksums are told. Else the first rank makes those of whole blocks
    owns     (number of a block in its sequence) -> whether this rank has a part of it
    """

    ranges: Callable[[BlockRef], Iterable[tuple[int, int]]]
    sums: bool
    owns: Callable[[int], bool] = lambda block: True


class Flights:
    """Batches of transfers, each under the number of its half or put.

    layout   of the blocks
    part     that they have of the blocks of the pool; None: all. What was read is compared with its checksum
             only where they have all
    """

    def __init__(self, transfers: TransferEngine, layout: BlockLayout, part: Part | None = None) -> None:
        self._transfers, self._layout, self._part = transfers, layout, part
        self._flights: dict[int, _Flight] = {}
        self._refused: list[TransferEnded] = []

    def begin(
        self,
        number: int,
        op: Literal["read", "write"],
        places: Seq[BlockRef],
        blocks: Iterable[np.ndarray],
        label: tuple[str, str],
        sums: Seq[list[int]] = (),
    ) -> None:
        """Begin the transfers of each block between `blocks` (local) and `places`, in order.

        A place with a check is compared with it once it is read.

        label   of TransferEngine.submit
        sums    told when the batch has ended
        """
        assert number not in self._flights, f"number {number} is in use"
        pairs = [(ref, block.reshape(-1).view(np.uint8)) for ref, block in zip(places, blocks)]
        moves = [move for ref, block in pairs for move in self._moves(op, ref, block)]
        tells = self._part is None or self._part.sums
        checked = [pair for pair in pairs if pair[0].check and op == "read" and tells]
        try:
            batch = self._transfers.submit(moves, label)
        except TransferError as error:
            self._refused.append(TransferEnded(number, str(error)))
        else:
            self._flights[number] = _Flight(batch, time.monotonic() + TRANSFER_LIMIT_S, checked, sums)

    def _moves(self, op: Literal["read", "write"], ref: BlockRef, block: np.ndarray) -> Iterator[Transfer]:
        """Yield the transfers between a block and its place. block: bytes"""
        if self._part is None:
            yield Transfer(op, block, ref.rank, 0, ref.offset, ref.nbytes)
            return
        first = 0
        for offset, nbytes in self._part.ranges(ref):
            yield Transfer(op, block[first : first + nbytes], ref.rank, 0, offset, nbytes)
            first += nbytes

    @property
    def flying(self) -> bool:
        """Tell whether a batch is under way."""
        return bool(self._flights)

    def help(self, limit_s: float) -> bool:
        """Do some of the copies of a batch, or wait for it for limit_s. Returns whether there is a batch."""
        for flight in self._flights.values():
            with contextlib.suppress(TransferError):  # ended() tells of it
                flight.batch.wait(limit_s)
            return True
        return bool(self._refused)

    def ended(self) -> list[TransferEnded]:
        """Take out the batches that have ended.

        Raises RuntimeError for a batch that does not end although it was cancelled.
        """
        ended, self._refused = self._refused, []
        for number, flight in list(self._flights.items()):
            if flight.batch.poll():
                del self._flights[number]
                ended.append(self._end(number, flight))
            elif time.monotonic() > flight.deadline:
                _cancel(flight)
        return ended

    def _end(self, number: int, flight: _Flight) -> TransferEnded:
        """Tell how a batch has ended. What was read is compared where that is wanted."""
        try:
            flight.batch.wait(0.0)
        except TransferError as error:
            return TransferEnded(number, str(error), bool(flight.batch.may_still_land))
        sums = self._layout.checksums
        if flight.checked and self._part is not None:
            return TransferEnded(number, sums=[sums(block) for _, block in flight.checked])
        bad = [ref for ref, block in flight.checked if check_of(sums(block)) != ref.check]
        return TransferEnded(number, BAD, bad=bad) if bad else TransferEnded(number, sums=flight.sums)


def _cancel(flight: _Flight) -> None:
    """Cancel a batch that is late. Raises RuntimeError when that was in vain."""
    if flight.cancelled:
        raise RuntimeError(
            f"a transfer has not ended {TRANSFER_LIMIT_S:.0f} s after its start, nor {CANCEL_LIMIT_S:.0f} s "
            "after it was cancelled"
        )
    flight.cancelled = True
    flight.deadline += CANCEL_LIMIT_S
    flight.batch.cancel()

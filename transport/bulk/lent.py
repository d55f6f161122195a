"""The buffers of this process that others may read and write: numbered segments, and transfers that use them.

Used by `sockets_server` and `courier`, which serve them. Every range is checked here, and a buffer is
released only when no transfer touches it. Knows no connections. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transport.bulk.batch import byte_view
from transport.errors import BadTransfer, TransferRefused, TransferTimeout

MAX_SEGMENTS = 1024
"""Most segments of one process: enough for every buffer that lives long, too few for one per transfer."""


@dataclass(slots=True, eq=False)
class Loan:
    """Ranges of one segment while a transfer uses them. cut: ends that transfer; any thread may call it."""

    lent: Lent
    views: list[np.ndarray]
    nbytes: int
    is_read: bool
    cut: Callable[[], None]


@dataclass(slots=True, eq=False)
class Lent:
    """One segment, and the transfers that use it."""

    view: np.ndarray
    writable: bool
    loans: list[Loan] = field(default_factory=list)


class LentBuffers:
    """Segments by number. Any thread may call anything.

    queued_bytes   of all requested transfers that have not ended
    served         bytes that others have "read" and "written"; counted when a transfer has ended
    """

    def __init__(self) -> None:
        self._segments: dict[int, Lent] = {}
        self._changed = threading.Condition()
        self.queued_bytes = 0
        self._served = {"read": 0, "written": 0}

    @property
    def served(self) -> dict[str, int]:
        """Return a copy of the counters."""
        with self._changed:
            return dict(self._served)

    def view(self, segment: int) -> np.ndarray | None:
        """Return the whole segment as uint8, for this process itself; None for an unknown number."""
        lent = self._segments.get(segment)
        return None if lent is None else lent.view

    def expose(self, segment: int, buffer: Any, *, writable: bool = True, once: bool = False) -> None:
        """Lend a contiguous buffer. It is kept alive, and Python will not resize it, until it is withdrawn.

        Raises BadTransfer when the number is taken or the buffer cannot be used; with `once` also when some
        of its bytes are lent already.
        """
        try:
            nbytes = memoryview(buffer).nbytes
        except TypeError:
            raise BadTransfer(f"segment {segment}: {type(buffer).__name__} is no buffer") from None
        view = byte_view(buffer, nbytes, writable)
        with self._changed:
            if segment in self._segments:
                raise BadTransfer(f"segment {segment} is exposed already")
            for number, lent in self._segments.items() if once else ():
                if np.may_share_memory(lent.view, view):
                    raise BadTransfer(f"the buffer of {nbytes} bytes is part of segment {number} already")
            if len(self._segments) >= MAX_SEGMENTS:
                raise BadTransfer(f"{MAX_SEGMENTS} segments are exposed already, which is the limit")
            self._segments[segment] = Lent(view, writable)

    def withdraw(self, segment: int, timeout_s: float = 5.0) -> None:
        """Stop lending a segment, and wait until no transfer touches it; cut off longer ones.

        Raises BadTransfer for an unknown number, TransferTimeout when a transfer cannot be cut off either.
        """
        with self._changed:
            lent = self._segments.pop(segment, None)
            if lent is None:
                raise BadTransfer(f"segment {segment} is not exposed; these are: {sorted(self._segments)}")
            if self._changed.wait_for(lambda: not lent.loans, timeout_s):
                return
            loans = list(lent.loans)
        for loan in loans:
            loan.cut()
        with self._changed:
            if not self._changed.wait_for(lambda: not lent.loans, timeout_s):
                raise TransferTimeout(f"segment {segment} is still used by {len(lent.loans)} transfers")

    def borrow(
        self,
        segment: int,
        offsets: Sequence[int],
        lengths: Sequence[int],
        is_read: bool,
        most: int,
        cut: Callable[[], None],
    ) -> Loan:
        """Lend the ranges that a request names, until give_back(). Raises TransferRefused with the reason."""
        with self._changed:
            lent = self._segments.get(segment)
            if lent is None:
                raise TransferRefused(f"segment {segment} is not exposed")
            if not is_read and not lent.writable:
                raise TransferRefused(f"segment {segment} is read-only")
            count, size = len(offsets), lent.view.nbytes
            if count != len(lengths) or count > most:
                raise TransferRefused(f"{count} offsets, {len(lengths)} lengths, at most {most}")
            for offset, length in zip(offsets, lengths, strict=True):
                if offset < 0 or length < 0 or offset + length > size:
                    raise TransferRefused(
                        f"range {offset}+{length} is outside the {size} bytes of segment {segment}"
                    )
            views = [lent.view[at : at + length] for at, length in zip(offsets, lengths, strict=True)]
            loan = Loan(lent, views, sum(lengths), is_read, cut)
            lent.loans.append(loan)
            self.queued_bytes += loan.nbytes
            return loan

    def give_back(self, loan: Loan, served: bool) -> None:
        """End a loan. served: every byte has moved. A second call does nothing."""
        with self._changed:
            if loan not in loan.lent.loans:
                return
            loan.lent.loans.remove(loan)
            self.queued_bytes -= loan.nbytes
            if served:
                self._served["read" if loan.is_read else "written"] += loan.nbytes
            self._changed.notify_all()

    def check(self) -> None:
        """Assert that the counters agree with the loans (tests)."""
        with self._changed:
            loans = [loan for lent in self._segments.values() for loan in lent.loans]
            assert sum(loan.nbytes for loan in loans) <= self.queued_bytes
            assert all(loan.lent in self._segments.values() for loan in loans)
            assert len(self._segments) <= MAX_SEGMENTS

"""What a caller hands to the engine (Transfer) and what it gets back (Batch).

Made by callers and by `engine`; filled in by the threads that move bytes. Knows neither MPI nor
sockets. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from transport.errors import BadTransfer, TransferError, TransferTimeout


@dataclass(slots=True)
class Transfer:
    """One range of bytes to be moved.

    op          "read": remote to local; "write": local to remote
    local       C-contiguous buffer (writable for a read) of at least nbytes, whose first nbytes are
                meant; or (segment, offset) of the own segment. Not to be touched until the batch is done
    rank        the other side; the own rank is allowed
    segment     0: each rank has one
    offset      in bytes, in the segment of `rank`
    """

    op: Literal["read", "write"]
    local: Any
    rank: int
    segment: int
    offset: int
    nbytes: int


def byte_view(local: Any, nbytes: int, writable: bool) -> np.ndarray:
    """The first nbytes of a buffer as (nbytes,) uint8, without a copy.

    Raises BadTransfer when it is no contiguous buffer, too small, or read-only where it must not be.
    """
    try:
        if isinstance(local, np.ndarray):
            flat = local if local.ndim == 1 and local.dtype == np.uint8 else None
            if not local.flags.c_contiguous:
                raise BadTransfer(f"the local array of shape {local.shape} is not C-contiguous")
            view = flat if flat is not None else local.reshape(-1).view(np.uint8)
        else:
            view = np.frombuffer(local, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise BadTransfer(f"local of type {type(local).__name__} is no contiguous buffer: {error}") from None
    if view.nbytes < nbytes:
        raise BadTransfer(f"the local buffer has {view.nbytes} bytes, the transfer {nbytes}")
    if writable and not view.flags.writeable:
        raise BadTransfer("the local buffer of a read is not writable")
    return view[:nbytes]


Copy = tuple[np.ndarray, np.ndarray, bool]
"""(destination, source, whether it is a read), uint8 of one length."""


class Batch:
    """Transfers that were submitted together. Done when each has ended, well or not.

    failures    index in the batch -> why; complete once the batch is done
    """

    __slots__ = ("_event", "_help", "_lock", "_parts", "copies", "failures", "transfers")

    def __init__(self, transfers: Sequence[Transfer], help_copying: Callable[[Batch], None]):
        self.transfers = transfers
        self.failures: dict[int, TransferError] = {}
        self.copies: deque[Copy] = deque()
        self._help = help_copying
        self._parts = 0
        self._lock = threading.Lock()
        self._event: threading.Event | None = None

    def poll(self) -> bool:
        """Whether every transfer has ended. Raises nothing; wait(0) tells of failures."""
        return self._parts <= 0

    def wait(self, timeout_s: float) -> None:
        """Wait until every transfer has ended; copies on the same node are helped along.

        Raises TransferTimeout when that takes longer than timeout_s (the transfers go on, and their
        buffers stay in use until poll() is true); otherwise the failure of the first that failed.
        """
        if self._parts > 0:
            deadline = time.monotonic() + timeout_s
            if self.copies:
                self._help(self)
            if not self._ended(max(0.0, deadline - time.monotonic())):
                raise TransferTimeout(f"{self._parts} parts of the batch are not done after {timeout_s:g} s")
        if self.failures:
            raise self.failures[min(self.failures)]

    def _ended(self, timeout_s: float) -> bool:
        with self._lock:
            if self._parts <= 0:
                return True
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        return event.wait(timeout_s)

    def add_parts(self, count: int) -> None:
        """The engine will report `count` more ends; called before any thread works on the batch."""
        self._parts += count

    def end_parts(self, count: int, failures: dict[int, TransferError] | None = None) -> None:
        """`count` parts have ended, with these failures by transfer index. Called by any thread."""
        with self._lock:
            if failures:
                self.failures.update(failures)
            self._parts -= count
            if self._parts <= 0 and self._event is not None:
                self._event.set()

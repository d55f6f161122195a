"""Transfer, which a caller hands to the engine, and Batch, which it gets back.

Made by callers and by `engine`; filled in by the threads that move bytes. Knows neither MPI nor
sockets. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import contextlib
import logging
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
    local       C-contiguous buffer (writable for a read) whose first nbytes are moved; or (segment, offset)
                of an own segment. The caller must not touch it until the batch is done
    rank        the other side; the own rank is allowed
    segment     0: the one that each rank has; other numbers come from register() of that rank
    offset      in bytes, in the segment of `rank`
    """

    op: Literal["read", "write"]
    local: Any
    rank: int
    segment: int
    offset: int
    nbytes: int


_UINT8 = np.dtype(np.uint8)


def byte_view(local: Any, nbytes: int, writable: bool) -> np.ndarray:
    """Return the first nbytes of a buffer as (nbytes,) uint8, without a copy.

    Raises BadTransfer when it is not a contiguous buffer, too small, or read-only where it must not be.
    """
    try:
        if isinstance(local, np.ndarray):
            flags = local.flags
            flat = local if local.ndim == 1 and local.dtype is _UINT8 else None
            if flat is not None and local.nbytes == nbytes and flags.c_contiguous and flags.writeable:
                return flat  # the usual case
            if not flags.c_contiguous:
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


Way = tuple[int, str]
"""(rank of the other side, "read" or "write"), by which moved bytes are counted."""

Copy = tuple[np.ndarray, np.ndarray, Way, int]
"""(destination, source, way, index of the transfer); both arrays are uint8 of one length."""

_log = logging.getLogger(__name__)


class Batch:
    """Transfers that were submitted together. Done when each has ended, with success or not.

    failures        index in the batch -> error; complete once the batch is done
    may_still_land  indices of failed transfers whose destination may still receive bytes: the other rank's
                    range for a write, the local buffer for a read; complete once the batch is done
    copies          copies that no thread has begun; helped: wait() runs some of them itself

    Invariant of a batch that is done: may_still_land is a subset of the indices in failures.
    """

    __slots__ = (
        "_callbacks", "_event", "_help", "_lock", "_parts", "_stop", "copies", "failures", "helped",
        "may_still_land", "transfers",
    )  # fmt: skip

    def __init__(
        self,
        transfers: Sequence[Transfer],
        help_copying: Callable[[Batch], None],
        stop: Callable[[Batch], None],
    ):
        self.transfers = transfers
        self.failures: dict[int, TransferError] = {}
        self.may_still_land: set[int] = set()
        self.copies: deque[Copy] = deque()
        self.helped = False
        self._help = help_copying
        self._stop = stop
        self._parts = 0
        self._lock = threading.Lock()
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[Batch], object]] = []

    def poll(self) -> bool:
        """Tell whether every transfer has ended. Raises nothing; wait(0) raises failures."""
        return self._parts <= 0

    def wait(self, timeout_s: float) -> None:
        """Wait until every transfer has ended; run some of the copies on the same node meanwhile.

        Raises TransferTimeout when that takes longer than timeout_s (the transfers continue, and their
        buffers stay in use until poll() is true), else the error of the first failed transfer.
        """
        if self._parts > 0:
            deadline = time.monotonic() + timeout_s
            if self.copies:
                self._help(self)
            if not self._ended(max(0.0, deadline - time.monotonic())):
                raise self._late(timeout_s)
        self._raise_failure()

    async def done(self, timeout_s: float) -> None:
        """Wait like wait(), for asyncio. Cancelling the task does not cancel the batch."""
        import asyncio  # ranks wait in threads, and start without it

        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def tell(_: Batch) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(ended.set)

        self.add_done_callback(tell)
        try:
            if not self.poll():
                await asyncio.wait_for(ended.wait(), timeout_s)
        except TimeoutError:
            raise self._late(timeout_s) from None
        self._raise_failure()

    def add_done_callback(self, callback: Callable[[Batch], object]) -> None:
        """Call callback(batch) once when every transfer has ended, or now if all have ended.

        It runs on the thread that ended the last transfer and delays its other transfers, so it must be
        short. Exceptions that it raises are logged.
        """
        with self._lock:
            if self._parts > 0:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def cancel(self) -> None:
        """Begin no more transfers of this batch; those that have not ended fail with TransferCancelled.

        Returns at once. The batch ends, for poll() and wait(), as soon as nothing touches its buffers.
        """
        if self._parts > 0:
            self._stop(self)

    def _ended(self, timeout_s: float) -> bool:
        with self._lock:
            if self._parts <= 0:
                return True
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        return event.wait(timeout_s)

    def _late(self, timeout_s: float) -> TransferTimeout:
        return TransferTimeout(f"{self._parts} parts of the batch are not done after {timeout_s:g} s")

    def _raise_failure(self) -> None:
        if self.failures:
            raise self.failures[min(self.failures)]

    def _call(self, callback: Callable[[Batch], object]) -> None:
        try:
            callback(self)
        except Exception:
            _log.exception("a callback of a batch of %d transfers failed", len(self.transfers))

    def add_parts(self, count: int) -> None:
        """Expect `count` more ends. Called before any thread works on the batch."""
        self._parts += count

    def end_parts(
        self, count: int, failures: dict[int, TransferError] | None = None, may_land: bool = False
    ) -> None:
        """Note that `count` parts have ended. Any thread may call this.

        failures    transfer index -> error
        may_land    whether bytes of these failed transfers may still be put in place
        """
        with self._lock:
            if failures:
                self.failures.update(failures)
                if may_land:
                    self.may_still_land.update(failures)
            self._parts -= count
            if self._parts > 0:
                return
            callbacks, self._callbacks = self._callbacks, []
            if self._event is not None:
                self._event.set()
        for callback in callbacks:
            self._call(callback)

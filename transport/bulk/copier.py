"""Copies on one node. submit() makes short ones; a worker thread and wait() share long ones.

Used by `engine` alone. Knows memory, not ranks. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from transport.bulk.batch import Batch, Copy, Way
from transport.errors import TransferCancelled, TransferError
from transport.threads import OnFatal, start_thread

INLINE_BYTES = 1 * 2**20
"""Copies of a batch up to this are done inside submit(): 40 us of memory copy, as long as it takes to
wake another thread."""

PIECE_BYTES = 2 * 2**20
"""Longer copies are cut into pieces of this size, which the worker and wait() share."""

SHARED_BYTES = 128 * 1024
"""Copies under this are not shared between threads."""

Copied = Callable[[Mapping[Way, int], int, float], None]
"""(bytes by way, copies, seconds)."""


class Copier:
    """Makes the copies of batches.

    copied      called after copies, on the thread that made them
    on_fatal    called when the worker thread dies, after its batches have failed
    """

    def __init__(self, copied: Copied, on_fatal: OnFatal | None = None):
        self._copied = copied
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._in_hand: Batch | None = None
        self._dead = ""
        self._lock = threading.Lock()  # so that no batch is queued behind the death of the worker
        self._worker = start_thread("copier", self._work, on_death=self._die, on_fatal=on_fatal)

    def copy_now(self, copies: Sequence[Copy]) -> None:
        """Make these copies, which are short."""
        start = time.perf_counter()
        moved: dict[Way, int] = {}
        for target, source, way, _ in copies:
            np.copyto(target, source)
            moved[way] = moved.get(way, 0) + target.nbytes
        self._copied(moved, len(copies), time.perf_counter() - start)

    def plan(self, batch: Batch, copies: Sequence[Copy]) -> None:
        """Give these copies to a batch, long ones in pieces."""
        for target, source, way, index in copies:
            nbytes = target.nbytes
            if nbytes <= PIECE_BYTES:
                batch.copies.append((target, source, way, index))
                continue
            for start in range(0, nbytes, PIECE_BYTES):
                end = start + PIECE_BYTES
                batch.copies.append((target[start:end], source[start:end], way, index))

    def queue(self, batch: Batch) -> None:
        """Have the worker make the copies of a batch. They fail if it has died."""
        with self._lock:
            if not self._dead:
                self._queue.put(batch)
                return
        self._take_away(batch, TransferError(self._dead))

    def copy_all(self, batch: Batch) -> None:
        """Make copies of a batch until none is left. A caller of wait() runs this beside the worker."""
        self._copy_all(batch, helping=True)

    def _copy_all(self, batch: Batch, helping: bool) -> None:
        """Make copies until none is left, or wait() is there to make the short ones.

        Two threads that make short copies mostly wait for each other's turn at the interpreter. So the worker
        leaves short copies to a caller of wait().
        """
        count = 0
        moved: dict[Way, int] = {}
        copies = batch.copies
        start = time.perf_counter()
        batch.helped = batch.helped or helping
        while True:
            try:
                target, source, way, index = copies.popleft()
            except IndexError:
                break
            try:
                np.copyto(target, source)  # releases the GIL
            except BaseException as error:
                why = TransferError(f"copying {target.nbytes} bytes: {type(error).__name__}: {error}")
                batch.end_parts(count + 1, {index: why})
                raise
            nbytes = target.nbytes
            count += 1
            moved[way] = moved.get(way, 0) + nbytes
            if not helping and batch.helped and nbytes < SHARED_BYTES:
                break
        if count:
            try:
                self._copied(moved, count, time.perf_counter() - start)
            finally:
                batch.end_parts(count)

    def cancel(self, batch: Batch) -> None:
        """Remove the copies that no thread has begun."""
        self._take_away(batch, TransferCancelled("the batch was cancelled"))

    def _take_away(self, batch: Batch, why: TransferError) -> None:
        taken = []
        while batch.copies:
            try:
                taken.append(batch.copies.popleft())
            except IndexError:
                break
        if taken:
            batch.end_parts(len(taken), {index: why for *_, index in taken})

    def close(self) -> None:
        """End the worker, after the copies that are queued."""
        self._queue.put(None)
        self._worker.join(timeout=5)

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            self._in_hand = batch
            self._copy_all(batch, helping=False)
            self._in_hand = None
            del batch  # a waiting thread must keep no buffer alive

    def _die(self, reason: str) -> None:
        """Fail the copies that the worker had begun, and those that wait for it."""
        with self._lock:
            self._dead = reason
        waiting = [] if self._in_hand is None else [self._in_hand]
        self._in_hand = None
        while not self._queue.empty():
            waiting += [batch] if (batch := self._queue.get()) is not None else []
        for batch in waiting:
            self._take_away(batch, TransferError(reason))

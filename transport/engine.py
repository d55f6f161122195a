"""TransferEngine: moves ranges of bytes between local buffers and the segments of other ranks.

Used by `store` and by the roles. On one node a window is memory and a transfer a copy; between nodes
`courier` moves the bytes with two-sided MPI. Knows nothing of what the bytes mean.
Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from transport.batch import Batch, Transfer, byte_view
from transport.errors import BadTransfer, EngineClosed, PeerLost, TransferError
from transport.segments import Segments

if TYPE_CHECKING:
    from transport.world import World

__all__ = ["Batch", "Transfer", "TransferEngine"]

INLINE_BYTES = 1 * 2**20
"""Copies of a batch up to this are done inside submit(): 40 us of memory copy, as long as it takes to
wake another thread."""

PIECE_BYTES = 2 * 2**20
"""Longer copies are cut, so that the worker and whoever waits can share them."""


@dataclass(slots=True)
class PathCounters:
    """What went over one path.

    transfers   ranges moved; on the shared path a long one counts once per PIECE_BYTES
    seconds     copying (shared), or from request to end (two_sided)
    """

    bytes_read: int = 0
    bytes_written: int = 0
    transfers: int = 0
    failed: int = 0
    seconds: float = 0.0


class TransferEngine:
    """The transfers of one rank, and its segment.

    world           all ranks; each makes its engine at the same time (collective)
    segment_bytes   of the own segment, which may be 0; it begins zeroed

    submit() may be called from any thread. Raises SegmentError, on all ranks, when the segments do not fit.
    """

    def __init__(self, world: World, segment_bytes: int):
        self._world = world
        self._segments = Segments(world, segment_bytes)
        self._lock = threading.Lock()
        self._counters = {"shared": PathCounters(), "two_sided": PathCounters()}
        self._lost: dict[int, str] = {}
        self._closed = False
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="copier", daemon=True)
        self._worker.start()

    @property
    def local(self) -> np.ndarray:
        """(segment_bytes,) uint8: the own segment."""
        return self._segments.local

    @property
    def sizes(self) -> list[int]:
        """Bytes of each rank's segment."""
        return self._segments.sizes

    @property
    def counters(self) -> dict[str, dict[str, float]]:
        """PathCounters by path, "shared" and "two_sided", as plain values."""
        with self._lock:
            return {path: asdict(counters) for path, counters in self._counters.items()}

    def path_to(self, rank: int) -> str:
        """ "shared" for a rank of this node, else "two_sided"."""
        return "shared" if rank in self._segments.views else "two_sided"

    def submit(self, transfers: Sequence[Transfer]) -> Batch:
        """Start these transfers and return at once (after copying, when they are few and local).

        Raises BadTransfer before anything has started when one of them can never work, EngineClosed
        after close(). A dead peer or a failure on the way is reported by the batch.
        """
        if self._closed:
            raise EngineClosed("the engine is closed")
        batch = Batch(transfers, self._copy_all)
        remote: dict[tuple[int, str], list[tuple[int, np.ndarray]]] = {}
        lost: dict[int, TransferError] = {}
        total = 0
        for index, transfer in enumerate(transfers):
            view = self._checked(transfer)
            if transfer.rank in self._lost:
                lost[index] = self._peer_lost(transfer.rank)
            elif transfer.rank in self._segments.views:
                self._plan_copy(batch, transfer, view)
                total += transfer.nbytes
            else:
                remote.setdefault((transfer.rank, transfer.op), []).append((index, view))
        self._start(batch, remote, lost, total)
        return batch

    def mark_lost(self, rank: int, reason: str) -> None:
        """This rank is dead: its transfers, now and later, fail with PeerLost at once; no others do.

        Any thread may call this, also twice.
        """
        self._lost.setdefault(rank, reason)

    def close(self) -> None:
        """End the threads; what was not done fails with EngineClosed. May be called twice."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._worker.join(timeout=5)

    def _peer_lost(self, rank: int) -> PeerLost:
        return PeerLost(f"rank {rank} is lost: {self._lost[rank]}", rank)

    def _checked(self, transfer: Transfer) -> np.ndarray:
        """The local bytes of a transfer that can work. Raises BadTransfer."""
        rank, offset, nbytes = transfer.rank, transfer.offset, transfer.nbytes
        if transfer.op not in ("read", "write"):
            raise BadTransfer(f"op {transfer.op!r}: use read or write", rank)
        if not 0 <= rank < self._world.size:
            raise BadTransfer(f"rank {rank}: there are ranks 0 to {self._world.size - 1}", rank)
        if transfer.segment != 0:
            raise BadTransfer(f"segment {transfer.segment} of rank {rank}: each has only segment 0", rank)
        self._check_range(rank, offset, nbytes)
        if isinstance(transfer.local, tuple):
            segment, start = transfer.local
            if segment != 0:
                raise BadTransfer(f"local segment {segment}: each rank has segment 0 alone", rank)
            self._check_range(self._world.rank, start, nbytes)
            return self._segments.local[start : start + nbytes]
        return byte_view(transfer.local, nbytes, writable=transfer.op == "read")

    def _check_range(self, rank: int, offset: int, nbytes: int) -> None:
        size = self._segments.sizes[rank]
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise BadTransfer(f"range {offset}+{nbytes} is outside the {size} bytes of rank {rank}", rank)

    def _plan_copy(self, batch: Batch, transfer: Transfer, view: np.ndarray) -> None:
        """Add the copies of a transfer on this node to the batch, long ones cut into pieces."""
        offset, nbytes = transfer.offset, transfer.nbytes
        there = self._segments.views[transfer.rank][offset : offset + nbytes]
        is_read = transfer.op == "read"
        target, source = (view, there) if is_read else (there, view)
        if nbytes <= PIECE_BYTES:
            batch.copies.append((target, source, is_read))
            return
        for start in range(0, nbytes, PIECE_BYTES):
            end = start + PIECE_BYTES
            batch.copies.append((target[start:end], source[start:end], is_read))

    def _start(
        self,
        batch: Batch,
        remote: dict[tuple[int, str], list[tuple[int, np.ndarray]]],
        lost: dict[int, TransferError],
        shared_bytes: int,
    ) -> None:
        """Hand the parts of a planned batch to those who do them."""
        batch.add_parts(len(batch.copies) + len(remote) + (1 if lost else 0))
        if lost:
            batch.end_parts(1, lost)
        if shared_bytes <= INLINE_BYTES:
            self._copy_all(batch)
        else:
            self._queue.put(batch)

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            self._copy_all(batch)

    def _copy_all(self, batch: Batch) -> None:
        """Do copies of a batch until none is left; several threads may do so at once."""
        count = read = written = 0
        start = time.perf_counter()
        while True:
            try:
                target, source, is_read = batch.copies.popleft()
            except IndexError:
                break
            np.copyto(target, source)  # releases the GIL
            count += 1
            if is_read:
                read += target.nbytes
            else:
                written += target.nbytes
        if count == 0:
            return
        with self._lock:
            shared = self._counters["shared"]
            shared.bytes_read += read
            shared.bytes_written += written
            shared.transfers += count
            shared.seconds += time.perf_counter() - start
        batch.end_parts(count)

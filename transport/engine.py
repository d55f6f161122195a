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
    from transport.courier import Courier, Job
    from transport.world import World

__all__ = ["Batch", "Transfer", "TransferEngine"]

INLINE_BYTES = 1 * 2**20
"""Copies of a batch up to this are done inside submit(): 40 us of memory copy, as long as it takes to
wake another thread."""

PIECE_BYTES = 2 * 2**20
"""Longer copies are cut, so that the worker and whoever waits can share them."""


Remote = dict[tuple[int, str], list[tuple[int, np.ndarray]]]
"""(rank, op) -> (index in the batch, local bytes) of each transfer with another node."""


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
    stall_s         between nodes: a transfer in which nothing moves for this long is tried once more,
                    then reported as TransferTimeout
    address         of this host, as other nodes reach it; found out when empty

    submit() may be called from any thread. Raises SegmentError, on all ranks, when the segments do not fit.
    """

    def __init__(self, world: World, segment_bytes: int, *, stall_s: float = 5.0, address: str = ""):
        self._world = world
        self._segments = Segments(world, segment_bytes)
        self._lock = threading.Lock()
        self._counters = {"shared": PathCounters(), "two_sided": PathCounters()}
        self._lost: dict[int, str] = {}
        self._closed = False
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="copier", daemon=True)
        self._worker.start()
        self._courier: Courier | None = None
        if not world.one_node:
            from transport.courier import Courier

            self._courier = Courier(world, self._segments.local, stall_s, address, self._end_job)

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

    @property
    def control_counters(self) -> dict[str, int]:
        """channel.Counters of the requests between nodes; empty on one node."""
        return self._courier.control() if self._courier is not None else {}

    @property
    def served_bytes(self) -> dict[str, int]:
        """Bytes of the own segment that ranks of other nodes have asked for: "read" and "written"."""
        return dict(self._courier.served_bytes) if self._courier is not None else {"read": 0, "written": 0}

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
        remote: Remote = {}
        lost: dict[int, TransferError] = {}
        total = 0
        for index, transfer in enumerate(transfers):
            view = self._checked(transfer)
            if transfer.rank in self._lost:
                lost[index] = PeerLost(transfer.rank, self._lost[transfer.rank])
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
        if self._courier is not None:
            self._courier.mark_lost(rank, reason)

    def close(self) -> None:
        """End the threads: copies on this node are finished, what is under way between nodes fails with
        EngineClosed. May be called twice."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self._queue.put(None)
        self._worker.join(timeout=5)
        if self._courier is not None:
            self._courier.close()

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
        remote: Remote,
        lost: dict[int, TransferError],
        shared_bytes: int,
    ) -> None:
        """Hand the parts of a planned batch to those who do them."""
        jobs = _jobs(batch, remote)
        batch.add_parts(len(batch.copies) + len(jobs) + (1 if lost else 0))
        if lost:
            batch.end_parts(1, lost)
        with self._lock:  # so that nothing is queued behind the end of the threads
            if self._closed:
                raise EngineClosed("the engine is closed")
            for job in jobs:
                assert self._courier is not None
                self._courier.start(job)
            if shared_bytes > INLINE_BYTES:
                self._queue.put(batch)
                return
        self._copy_all(batch)

    def _end_job(self, job: Job, error: TransferError | None) -> None:
        """Called by the courier with each job that has ended."""
        with self._lock:
            counters = self._counters["two_sided"]
            counters.seconds += time.monotonic() - job.started_s if job.started_s else 0.0
            if error is not None:
                counters.failed += len(job.indices)
            else:
                counters.transfers += len(job.indices)
                if job.op == "read":
                    counters.bytes_read += job.nbytes
                else:
                    counters.bytes_written += job.nbytes
        if isinstance(error, PeerLost):
            self._lost.setdefault(job.rank, error.reason)
        job.batch.end_parts(1, None if error is None else dict.fromkeys(job.indices, error))

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


def _jobs(batch: Batch, remote: Remote) -> list[Job]:
    """What the courier shall do for this batch: a job per rank and direction, of bounded length."""
    if not remote:
        return []
    from transport.courier import Job
    from transport.requests import MAX_RANGES

    jobs = []
    for (rank, op), entries in remote.items():
        for first in range(0, len(entries), MAX_RANGES):
            some = entries[first : first + MAX_RANGES]
            indices = [index for index, _ in some]
            views = [view for _, view in some]
            offsets = [batch.transfers[index].offset for index in indices]
            jobs.append(Job(op, rank, batch, indices, views, offsets))
    return jobs

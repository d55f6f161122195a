"""TransferEngine: moves ranges of bytes between local buffers and the segments of other ranks.

Used by `store` and by the roles. On one node a window is memory and a transfer a copy; between nodes the
bytes take the path that was measured to be the fastest (`links`), and another when that fails.
Knows no meaning of the bytes. The door to transport/bulk, where each of its parts is a file. Explained in
docs/explain/transport.md.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from transport.bulk.batch import Batch, Copy, Transfer, Way, byte_view
from transport.bulk.copier import INLINE_BYTES, Copier
from transport.bulk.jobs import TransferJob, jobs_of
from transport.bulk.lent import LentBuffers
from transport.bulk.links import Link
from transport.bulk.remote import REMOTE_PATHS, PathCounters, Remote
from transport.bulk.segments import Segments
from transport.errors import BadTransfer, EngineClosed, PeerLost, TransferError
from transport.threads import OnFatal

if TYPE_CHECKING:
    from transport.world import World

__all__ = ["Batch", "Link", "Transfer", "TransferEngine"]

PATHS = ("shared", *REMOTE_PATHS)
"""Paths: memory of the same node; windows between nodes (one_sided); the others are messages."""

FORCED = "MOONCAKE_LITE_TRANSFER_PATH"
"""Environment variable that forces one path to all other ranks, even if another is faster."""


MOST = 2**63 - 1
"""Largest number of a segment, and largest offset: the largest integer of a message."""


class TransferEngine:
    """The transfers of one rank, and its segments.

    world           all ranks; each makes its engine at the same time (collective)
    segment_bytes   of segment 0, which may be 0; it begins zeroed
    stall_s         between nodes: a transfer in which nothing moves for this long is tried once more, over
                    another path if there is one, then reported as TransferTimeout
    path            one of PATHS for all other ranks; else the environment's FORCED; else the fastest one
    on_fatal        called when a thread of the engine dies, after its transfers have failed; without it they
                    fail, and the program continues

    Any thread may call submit(). Raises SegmentError, on all ranks, when the segments do not fit, BadTransfer
    for a path that is unknown or unavailable.
    """

    def __init__(
        self,
        world: World,
        segment_bytes: int,
        *,
        stall_s: float = 5.0,
        path: str = "",
        on_fatal: OnFatal | None = None,
    ):
        path = path or os.environ.get(FORCED, "")
        if path and path not in PATHS:
            raise BadTransfer(f"path {path!r} is unknown; use one of {', '.join(PATHS)}")
        if path == "shared" and not world.one_node:
            raise BadTransfer("path 'shared' cannot reach the ranks of other nodes")
        if path == "one_sided" and world.survives_a_rank:
            raise BadTransfer(
                "path 'one_sided' needs a job that ends with its first dead rank: --mpi-profile fast"
            )
        self._world = world
        self.has_lost = False
        self._segments = Segments(world, segment_bytes)
        self._size, self._sizes = world.size, self._segments.sizes
        self._lock = threading.Lock()
        self._shared = PathCounters()
        self._moved: Counter[Way] = Counter()
        self._closed = False
        self._numbers = itertools.count(1)
        self._copier = Copier(self._copied, on_fatal)
        self._lent = LentBuffers()
        self._lent.expose(0, self._segments.local)
        # Memory that this process reaches by itself: of all ranks of the node, unless a path is forced.
        self._near = self._segments.views if path in ("", "shared") else {world.rank: self._segments.local}
        self._remote = Remote(world, self._lent, self._near, path, stall_s, on_fatal)

    # ------------------------------------------------------------------ what is where

    @property
    def local(self) -> np.ndarray:
        """Return the own segment 0, (segment_bytes,) uint8."""
        return self._segments.local

    def mapped(self, rank: int) -> np.ndarray | None:
        """Return segment 0 of a rank of this node, (its size,) uint8; None for other ranks."""
        return self._segments.views.get(rank)

    @property
    def sizes(self) -> list[int]:
        """Return the bytes of each rank's segment 0."""
        return self._segments.sizes

    def register(self, buffer: Any, *, writable: bool = True) -> int:
        """Make a buffer of this process a segment, and return its number, which other ranks need.

        It is for memory that lives long: other ranks reach it by messages, never as shared memory. The buffer
        is kept alive, and Python refuses to resize it, until unregister(). Raises BadTransfer when it cannot
        be used, or is registered already.
        """
        if self._closed:
            raise EngineClosed("the engine is closed")
        number = next(self._numbers)
        self._lent.expose(number, buffer, writable=writable, once=True)
        return number

    def unregister(self, segment: int, timeout_s: float = 5.0) -> None:
        """Withdraw a registered buffer. Waits until no transfer touches it; after timeout_s cuts them off.

        Raises BadTransfer for an unknown segment and for segment 0.
        """
        if segment == 0:
            raise BadTransfer("segment 0 stays as long as the engine")
        self._lent.withdraw(segment, timeout_s)

    def ways_to(self, rank: int, nbytes: int = 2**20) -> list[str]:
        """Return the paths for a transfer of so many bytes with segment 0 of this rank.

        The preferred path comes first, then the path of a second try.
        """
        return ["shared"] if rank in self._near else self._remote.ways(rank, nbytes)

    def path_to(self, rank: int, nbytes: int = 2**20) -> str:
        """Return the first of ways_to()."""
        return self.ways_to(rank, nbytes)[0]

    def links_to(self, rank: int) -> list[Link]:
        """Return the measured links to this rank's node, the fastest for 1 MiB first."""
        return self._remote.links_to(rank, 2**20)

    # ------------------------------------------------------------------ what goes on

    @property
    def counters(self) -> dict[str, dict[str, float]]:
        """Return PathCounters by path, as plain values, without unavailable paths."""
        with self._lock:
            shared = self._shared.as_dict()
        return {"shared": shared, **self._remote.counters}

    @property
    def moved_bytes(self) -> dict[Way, int]:
        """Return the bytes that this rank has read from and written to each other rank, over all paths."""
        with self._lock:
            near = {way: nbytes for way, nbytes in self._moved.items() if way[0] != self._world.rank}
        return dict(Counter(near) + self._remote.moved)

    @property
    def control_counters(self) -> dict[str, int]:
        """Return channel.Counters of the requests of two-sided transfers; {} without that path."""
        return self._remote.control()

    @property
    def socket_counters(self) -> dict[str, int]:
        """Return sockets_server.ServerCounters: connections, strangers, refusals and drops."""
        return self._remote.sockets.server.counters

    @property
    def served_bytes(self) -> dict[str, int]:
        """Return the bytes of own segments that other ranks have "read" and "written" over messages."""
        return self._lent.served

    @property
    def serving_bytes(self) -> int:
        """Return the bytes that other ranks have requested over messages and that have not moved yet."""
        return self._lent.queued_bytes

    # ------------------------------------------------------------------ transfers

    def submit(self, transfers: Sequence[Transfer], label: tuple[str, str] = ("", "")) -> Batch:
        """Start these transfers and return at once (after copying, if they are few and local).

        label   purpose of the transfers, and their request if any; only shown in traces

        Raises BadTransfer before any transfer starts if one of them can never work, EngineClosed after
        close(). The batch reports a dead peer or a failure on the way.
        """
        if self._closed:
            raise EngineClosed("the engine is closed")
        batch = Batch(transfers, self._copier.copy_all, self._cancel)
        remote: dict[tuple[int, str, int], list[tuple[int, np.ndarray]]] = {}
        lost: dict[int, TransferError] = {}
        gone, total = self._remote.lost, 0
        copies: list[Copy] = []
        for index, transfer in enumerate(transfers):
            rank, offset, nbytes = transfer.rank, transfer.offset, transfer.nbytes
            view = self._checked(transfer)
            memory = self._near.get(rank) if transfer.segment == 0 else self._other_memory(transfer)
            if gone and rank in gone:
                lost[index] = PeerLost(rank, gone[rank])
            elif memory is not None:
                there = memory[offset : offset + nbytes]
                way = rank, transfer.op
                copies.append((view, there, way, index) if way[1] == "read" else (there, view, way, index))
                total += nbytes
            else:
                remote.setdefault((rank, transfer.op, transfer.segment), []).append((index, view))
        if not remote and not lost and total <= INLINE_BYTES:
            self._copier.copy_now(copies)
            return batch
        self._start(batch, copies, jobs_of(batch, remote), lost)
        return batch

    def mark_lost(self, rank: int, reason: str) -> None:
        """Fail transfers with this dead rank with PeerLost at once, now and later.

        Any thread may call this, also twice.
        """
        self.has_lost = True
        self._remote.mark_lost(rank, reason)

    def close(self) -> None:
        """End the threads. May be called twice.

        Copies on this node are finished; transfers under way between nodes fail with EngineClosed.
        """
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self._copier.close()
        self._remote.close()

    def check(self) -> None:
        """Assert that the counters agree with the transfers under way (tests)."""
        self._lent.check()
        self._remote.check()

    def _cancel(self, batch: Batch) -> None:
        self._copier.cancel(batch)
        self._remote.cancel(batch)

    def _copied(self, moved: Mapping[Way, int], count: int, seconds: float) -> None:
        with self._lock:
            shared = self._shared
            for way, nbytes in moved.items():
                self._moved[way] += nbytes
                if way[1] == "read":
                    shared.bytes_read += nbytes
                else:
                    shared.bytes_written += nbytes
            shared.transfers += count
            shared.seconds += seconds

    def _start(
        self, batch: Batch, copies: list[Copy], jobs: list[TransferJob], lost: dict[int, TransferError]
    ) -> None:
        """Hand the parts of a planned batch to the copier and to the paths."""
        self._copier.plan(batch, copies)
        batch.add_parts(len(batch.copies) + len(jobs) + (1 if lost else 0))
        if lost:
            batch.end_parts(1, lost)
        with self._lock:  # so that nothing is queued behind the end of the threads
            if self._closed:
                raise EngineClosed("the engine is closed")
            for job in jobs:
                self._remote.start(job)
            if copies:
                self._copier.queue(batch)

    def _other_memory(self, transfer: Transfer) -> np.ndarray | None:
        """Return the memory of a segment that this rank can copy; None if messages must move the bytes."""
        return self._lent.view(transfer.segment) if transfer.rank == self._world.rank else None

    def _checked(self, transfer: Transfer) -> np.ndarray:
        """Return the local bytes of a transfer. Raises BadTransfer if it can never work."""
        rank, segment, offset, nbytes = transfer.rank, transfer.segment, transfer.offset, transfer.nbytes
        op, local = transfer.op, transfer.local
        if op != "read" and op != "write":
            raise BadTransfer(f"op {op!r}: use read or write", rank)
        if not 0 <= rank < self._size:
            raise BadTransfer(f"rank {rank}: there are ranks 0 to {self._size - 1}", rank)
        if segment == 0:
            if not 0 <= offset <= offset + nbytes <= self._sizes[rank]:
                self._check_range(rank, self._sizes[rank], offset, nbytes)
        elif rank == self._world.rank:
            self._check_range(rank, self._own(segment).nbytes, offset, nbytes)
        elif min(segment, offset, nbytes) < 0 or max(segment, offset + nbytes) > MOST:
            # the rest is known to the other rank alone
            raise BadTransfer(f"segment {segment}, range {offset}+{nbytes}: not within 0 to {MOST}", rank)
        if not isinstance(local, tuple):
            return byte_view(local, nbytes, op == "read")
        number, start = local
        view = self._own(number)
        self._check_range(self._world.rank, view.nbytes, start, nbytes)
        return byte_view(view[start : start + nbytes], nbytes, op == "read")

    def _own(self, segment: int) -> np.ndarray:
        view = self._lent.view(segment)
        if view is None:
            raise BadTransfer(f"segment {segment} of rank {self._world.rank} is not there", self._world.rank)
        return view

    def _check_range(self, rank: int, size: int, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise BadTransfer(f"range {offset}+{nbytes} is outside the {size} bytes of rank {rank}", rank)

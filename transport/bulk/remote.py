"""Transfers that are no memory copies: the path of each job, its second try, and the jobs under way.

Made by `engine`. Knows jobs and paths, not how a path moves bytes. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Container
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from transport import errors
from transport.bulk import links
from transport.bulk.batch import Batch, Way
from transport.bulk.jobs import Path, TransferJob
from transport.bulk.lent import LentBuffers
from transport.bulk.socket_path import STREAMS, SocketPath
from transport.threads import OnFatal

if TYPE_CHECKING:
    from transport.bulk.courier import Courier
    from transport.bulk.one_sided import OneSided
    from transport.world import World

ANY_SEGMENT = ("two_sided", "sockets")
"""Paths that reach every segment: two-sided MPI, and TCP sockets of our own."""

REMOTE_PATHS = ("one_sided", *ANY_SEGMENT)
"""All paths. One-sided MPI reaches only segments with a window."""

TRIES = 2
"""Tries of a job, the second over another path if there is one: a third would meet the same two paths."""


@dataclass(slots=True)
class PathCounters:
    """Counters of one path.

    transfers   ranges moved; on the shared path a long one counts once per PIECE_BYTES
    failed      ranges whose try failed here
    retried     ranges that came here for their second try
    seconds     copying (shared), or from request to end (the others)
    """

    bytes_read: int = 0
    bytes_written: int = 0
    transfers: int = 0
    failed: int = 0
    retried: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the counters by name."""
        return asdict(self)


class Remote:
    """The jobs of one rank. Collective: every rank makes one at the same time.

    near        ranks whose segment 0 is memory here: no path is measured to them
    on_fatal    called when a thread of a path dies, after its jobs have failed
    forced      one of REMOTE_PATHS that is to serve all that it reaches, or ""
    lost        rank -> reason, of those that were marked or found dead

    Raises BadTransfer, at every rank, when one_sided is forced where it is unavailable.
    """

    def __init__(
        self,
        world: World,
        lent: LentBuffers,
        near: Container[int],
        forced: str,
        stall_s: float,
        on_fatal: OnFatal | None = None,
    ):
        self._world, self._forced, self._on_fatal = world, forced, on_fatal
        self.lost: dict[int, str] = {}
        self._lock = threading.Lock()
        self._jobs: set[TransferJob] = set()
        self._queued: Counter[int] = Counter()
        self._moved: Counter[Way] = Counter()
        self._courier: Courier | None = None
        # On one node too: registered buffers can be reached over nothing else.
        self.sockets = SocketPath(world, lent, stall_s, self._ended, on_fatal)
        self._paths: dict[str, Path] = {"sockets": self.sockets}
        self._one_sided: OneSided | None = None
        self._measuring = False
        others = [rank for rank in range(world.size) if rank not in near]
        if others and forced != "sockets":
            from transport.bulk.courier import Courier

            self._courier = Courier(world, lent, others, stall_s, self._ended, on_fatal)
            self._paths["two_sided"] = self._courier
        if forced == "one_sided" or not (forced or world.one_node):
            self._open_windows(lent, stall_s)
        self._counters = {name: PathCounters() for name in sorted(self._paths)}
        self._links = links.Links({})
        if not forced and not world.one_node:
            self._measure(lent, others)

    def _open_windows(self, lent: LentBuffers, stall_s: float) -> None:
        """Offer one-sided MPI if all ranks end together and MPI can make windows; alike at every rank."""
        answers = self._world.allgather_bytes(b"0" if self._world.survives_a_rank else b"1")
        if all(answer == b"1" for answer in answers):
            from transport.bulk.one_sided import OneSided

            segment = lent.view(0)
            assert segment is not None
            one_sided = OneSided(self._world, stall_s, self._help_from, self._ended, self._on_fatal)
            if one_sided.expose(0, segment):
                self._one_sided = self._paths["one_sided"] = one_sided
                return
            one_sided.close()
        if self._forced:
            self.close()
            raise errors.BadTransfer("path 'one_sided' cannot be used: MPI makes no window of all ranks")

    def _help_from(self, rank: int) -> None:
        """Have a rank enter MPI, except in a measurement, which shows the network without that help."""
        if self._courier is not None and not self._measuring:
            self._courier.help_from(rank)

    def _measure(self, lent: LentBuffers, others: list[int]) -> None:
        self._measuring = True
        probe = np.ones(links.LARGE_BYTES, np.uint8)
        lent.expose(links.PROBE, probe, writable=False)
        paths: dict[str, tuple[int, ...]] = {"sockets": STREAMS, "two_sided": (1,)}
        one_sided = self._one_sided
        if one_sided is not None and one_sided.expose(links.PROBE, probe):
            paths["one_sided"] = (1,)
        self._world.barrier()
        measure = functools.partial(links.measure, self._world, self._probe, paths)
        self._links = measure() if one_sided is None else one_sided.run(measure)
        self._measuring = False
        lent.withdraw(links.PROBE)
        if one_sided is not None and "one_sided" in paths:
            one_sided.withdraw(links.PROBE)
            one_sided.at_once |= {rank for rank in others if self.ways(rank, 0)[0] == "one_sided"}
        for rank in others:
            for link in self.links_to(rank, 0):
                if link.path == "sockets":
                    self.sockets.streams[rank] = link.streams
        with self._lock:  # measurements do not count as transfers
            self._counters = {name: PathCounters() for name in sorted(self._paths)}
            self._moved.clear()

    def _probe(self, path: str, rank: int, buffer: np.ndarray, streams: int, limit_s: float) -> None:
        """links.Read: one read over one path, without a second try."""
        batch = Batch([], lambda batch: None, self.cancel)
        batch.add_parts(1)
        job = TransferJob("read", rank, links.PROBE, batch, [0], [buffer], [0], [path])
        self.sockets.streams[rank] = streams
        self._begin(job)
        try:
            batch.wait(limit_s)
        except errors.TransferError:
            batch.cancel()
            raise

    # ------------------------------------------------------------------ what is known

    def ways(self, rank: int, nbytes: int) -> list[str]:
        """Return the paths for so many bytes, the preferred one first."""
        if self._forced:
            return [self._forced]
        found = [link.path for link in self.links_to(rank, nbytes)]
        return found or [name for name in ANY_SEGMENT if name in self._paths]

    def links_to(self, rank: int, nbytes: int) -> list[links.Link]:
        """Return the measured links to the rank's node, the fastest for so many bytes first."""
        return self._links.ranked(self._world.node_of[rank], nbytes)

    @property
    def counters(self) -> dict[str, dict[str, float]]:
        """Return PathCounters by path, as plain values."""
        with self._lock:
            return {name: counters.as_dict() for name, counters in self._counters.items()}

    @property
    def moved(self) -> Counter[Way]:
        """Return the bytes of the jobs that have succeeded."""
        with self._lock:
            return self._moved.copy()

    def control(self) -> dict[str, int]:
        """Return channel.Counters of the two-sided path, summed over its sockets."""
        return self._courier.control() if self._courier is not None else {}

    def check(self) -> None:
        """Assert that the counters agree with the jobs under way (tests)."""
        with self._lock:
            queued: Counter[int] = Counter()
            for job in self._jobs:
                queued[job.rank] += job.nbytes
            assert +queued == +self._queued, (queued, self._queued)

    # ------------------------------------------------------------------ jobs

    def start(self, job: TransferJob) -> None:
        """Begin a job over the path that is best for its size. Its batch gets its end."""
        near = self._world.node_of[job.rank] == self._world.node_of[self._world.rank]
        forced = self._forced in self._paths  # not "shared", which reaches segment 0 alone
        ways = ["sockets"] if near and not forced else self.ways(job.rank, job.nbytes)
        one_sided = self._one_sided
        if one_sided is None or not one_sided.reaches(job.rank, job.segment, bool(self._forced)):
            ways = [way for way in ways if way != "one_sided"] or ["sockets"]
        job.ways = [*ways, *ways][:TRIES]
        self._begin(job)

    def _begin(self, job: TransferJob) -> None:
        with self._lock:
            self._jobs.add(job)
            self._queued[job.rank] += job.nbytes
        job.started_s = time.monotonic()
        self._paths[job.ways[0]].start(job)

    def cancel(self, batch: Batch) -> None:
        """Cancel the jobs of a batch; each ends as soon as nothing touches its buffers."""
        with self._lock:
            jobs = [job for job in self._jobs if job.batch is batch]
        for job in jobs:
            job.cancelled = True
            for way in job.ways[:1]:  # none when it ends at this moment
                self._paths[way].cancel(job)

    def mark_lost(self, rank: int, reason: str) -> None:
        """Fail jobs with this rank with PeerLost, those under way and later ones."""
        self.lost.setdefault(rank, reason)
        for path in self._paths.values():
            path.mark_lost(rank, reason)

    def close(self) -> None:
        """Fail jobs under way with EngineClosed, and end the threads."""
        for path in self._paths.values():
            path.close()

    def _ended(self, job: TransferJob, error: errors.TransferError | None, safe: bool) -> None:
        """End a try of a job, and begin the next one if there is one. safe: it may be tried again."""
        path = job.ways.pop(0)
        if job.cancelled and error is not None:
            error = errors.TransferCancelled("the batch was cancelled", job.rank)
        final = not job.ways or job.cancelled or not safe or self._is_final(path, job.rank, error)
        seconds = time.monotonic() - job.started_s
        with self._lock:
            self._count(path, job, error, seconds)
            if error is None or final:
                self._jobs.discard(job)
                self._queued[job.rank] -= job.nbytes
            else:
                self._counters[job.ways[0]].retried += len(job.indices)
        if error is not None and not final:
            job.started_s = time.monotonic()
            self._paths[job.ways[0]].start(job)
            return
        if isinstance(error, errors.PeerLost) and self._is_final(path, job.rank, error):
            self.mark_lost(job.rank, error.reason)
        failures = None if error is None else dict.fromkeys(job.indices, error)
        job.batch.end_parts(1, failures, may_land=self._may_land(job))

    def _may_land(self, job: TransferJob) -> bool:
        """Tell whether bytes of a failed job may still land. The segment of a lost rank is gone."""
        return job.may_land and not (job.op == "write" and job.rank in self.lost)

    def _is_final(self, path: str, rank: int, error: errors.TransferError | None) -> bool:
        """Tell whether another path would fail too: the other side refused, or is certainly dead.

        A broken connection may be the network's fault. A port without a listener, or an error of MPI, is not.
        """
        if isinstance(error, errors.PeerLost):
            return rank in self.lost or path == "two_sided" or error.nobody_listens
        return isinstance(error, errors.TransferRefused | errors.TransferCancelled | errors.EngineClosed)

    def _count(self, path: str, job: TransferJob, error: errors.TransferError | None, seconds: float) -> None:
        counters = self._counters[path]
        counters.seconds += seconds
        if error is not None:
            counters.failed += len(job.indices)
            return
        counters.transfers += len(job.indices)
        self._moved[job.rank, job.op] += job.nbytes
        if job.op == "read":
            counters.bytes_read += job.nbytes
        else:
            counters.bytes_written += job.nbytes

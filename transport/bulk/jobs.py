"""TransferJob, the transfers of one batch with one rank in one direction; Path, which carries jobs out.

Made by `engine`, done by `courier` (two-sided MPI), `one_sided` (windows) and `socket_path` (TCP). Knows
none of them. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from transport.bulk.batch import Batch
from transport.errors import TransferError

MAX_RANGES = 4096
"""Most ranges of one job; more become several jobs. A request names so many in one message (`requests`)."""

MAX_BYTES = 64 * 2**20
"""Most bytes of one job; more become several jobs. A receiver posts all receives of a job at once."""


@dataclass(slots=True, eq=False)
class TransferJob:
    """One part of a batch.

    views, offsets   of each transfer: its local bytes, and where they belong in the other's segment
    indices          of the transfers in the batch
    ways             names of paths: that of this try, then those still to be tried
    cancelled        begin no more of it
    may_land         bytes of a failed try may still land; its path sets it before it calls Ended
    """

    op: str
    rank: int
    segment: int
    batch: Batch
    indices: list[int]
    views: list[np.ndarray]
    offsets: list[int]
    ways: list[str] = field(default_factory=list)
    started_s: float = 0.0
    cancelled: bool = False
    may_land: bool = False
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(view.nbytes for view in self.views)


Ended = Callable[[TransferJob, TransferError | None, bool], None]
"""(job, its error or None, whether it may be tried again).

A path allows a second try if late bytes of the first one cannot harm it: none can come, or they are the same
bytes in the same place. If bytes may come all the same, the path sets job.may_land first.
"""


class Path(Protocol):
    """Moves jobs to and from ranks. start() and cancel() may be called from any thread and never wait."""

    def start(self, job: TransferJob) -> None:
        """Begin a job. The path calls its Ended at the end."""

    def cancel(self, job: TransferJob) -> None:
        """End a job of this path early. The path still calls its Ended."""

    def mark_lost(self, rank: int, reason: str) -> None:
        """Fail jobs with this rank with PeerLost, those under way and later ones."""

    def close(self) -> None:
        """Fail all jobs with EngineClosed, those under way and later ones, and end the threads."""


def jobs_of(
    batch: Batch, remote: Mapping[tuple[int, str, int], list[tuple[int, np.ndarray]]]
) -> list[TransferJob]:
    """Cut a batch into jobs, of at most MAX_RANGES ranges and MAX_BYTES each.

    remote      (rank, op, segment) -> (index in the batch, local bytes) of each transfer

    Numbers may be NumPy's. Those of a job are plain, because a message cannot hold NumPy's.
    """
    jobs: list[TransferJob] = []
    for (rank, op, segment), entries in remote.items():
        parts = [
            part
            for index, view in entries
            for part in _parts(index, int(batch.transfers[index].offset), view)
        ]
        some: list[tuple[int, int, np.ndarray]] = []
        room = MAX_BYTES
        for part in parts:
            if some and (len(some) == MAX_RANGES or part[2].nbytes > room):
                jobs.append(_job(op, rank, segment, batch, some))
                some, room = [], MAX_BYTES
            some.append(part)
            room -= part[2].nbytes
        jobs.append(_job(op, rank, segment, batch, some))
    return jobs


def _parts(index: int, offset: int, view: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
    """Return (index, offset, bytes) of a range, cut into several if it is longer than a job."""
    if view.nbytes <= MAX_BYTES:
        return [(index, offset, view)]
    starts = range(0, view.nbytes, MAX_BYTES)
    return [(index, offset + start, view[start : start + MAX_BYTES]) for start in starts]


def _job(
    op: str, rank: int, segment: int, batch: Batch, parts: list[tuple[int, int, np.ndarray]]
) -> TransferJob:
    indices, offsets, views = (list(column) for column in zip(*parts, strict=True))
    return TransferJob(op, int(rank), int(segment), batch, indices, views, offsets)  # type: ignore[arg-type]

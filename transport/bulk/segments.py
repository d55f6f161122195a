"""One large segment of memory per rank, in an MPI window shared by the ranks of a node.

Used by `engine` alone. MPI windows are collective, so each rank has one segment from the start, and
its users allocate ranges within it. Knows no transfers. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import psutil

from transport.errors import SegmentError
from transport.world import World

BACKING = "OMPI_MCA_osc_sm_backing_directory"
"""Open MPI's parameter for the folder behind shared windows; mpirun --mca sets the same variable."""

MEMORY_SLACK_BYTES = 64 * 2**20
"""Memory of this machine that must stay free besides the segments. Any value of this order works."""


def backing_folder() -> Path:
    """Return the folder in which Open MPI puts the file behind a shared window."""
    chosen = os.environ.get(BACKING)
    return Path(chosen or "/dev/shm")


def shortage(need_bytes: int, folder: Path) -> str:
    """Return why `need_bytes` of segments do not fit on this machine, and the fix; "" when they do."""
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        return f"folder {folder} for shared memory cannot be used: {error.strerror}"
    free_bytes = stat.f_bavail * stat.f_frsize
    if need_bytes > free_bytes:
        return (
            f"the segments need {need_bytes} bytes of shared memory and {folder} has {free_bytes} free; "
            f"ask for less, enlarge it (mount -o remount,size=... {folder}), "
            f"or set OMPI_MCA_osc_sm_backing_directory to a folder with room"
        )
    available = psutil.virtual_memory().available
    if need_bytes + MEMORY_SLACK_BYTES > available:
        return f"the segments need {need_bytes} bytes and the machine has {available} available; ask for less"
    return ""


class Segments:
    """The segments of all ranks.

    sizes   (world.size,) list of int: bytes of each rank's segment
    views   rank -> (sizes[rank],) uint8, writable; the ranks of this node only
    local   the own one

    Collective. Raises SegmentError on every rank, with the same text, when they do not fit on some node.
    """

    def __init__(self, world: World, nbytes: int):
        if nbytes < 0:
            raise SegmentError(f"a segment of {nbytes} bytes")
        self.sizes = [
            int.from_bytes(size, "little") for size in world.allgather_bytes(nbytes.to_bytes(8, "little"))
        ]
        self._agree(world)
        self.views = self._allocate(world, nbytes)
        self.local = self.views[world.rank]
        # Each page is taken now: a file system that turns out too small is a SIGBUS at its first use.
        self.local[:: mmap.PAGESIZE] = 0

    def _agree(self, world: World) -> None:
        """Raise on all ranks if the segments do not fit on some node, before any rank allocates.

        A rank that failed alone would leave the others hanging in a collective step.
        """
        pages = [-(-self.sizes[rank] // mmap.PAGESIZE) for rank in world.node_ranks]
        why = shortage(sum(pages) * mmap.PAGESIZE, backing_folder())
        verdicts = world.allgather_bytes(why.encode())
        for rank, verdict in enumerate(verdicts):
            if verdict:
                raise SegmentError(f"host {world.hostnames[rank]}: {verdict.decode()}")

    def _allocate(self, world: World, nbytes: int) -> dict[int, np.ndarray]:
        info = world.mpi.Info.Create()
        info.Set("alloc_shared_noncontig", "true")  # each segment begins at a page, near its own rank
        try:
            window = world.mpi.Win.Allocate_shared(nbytes, 1, info, world.node_comm)
        except world.mpi.Exception as error:
            raise SegmentError(
                f"rank {world.rank}: MPI cannot make a window of {nbytes} bytes: {error}"
            ) from None
        finally:
            info.Free()
        world.free_at_finish(window.Free)
        views = {}
        for place, rank in enumerate(world.node_ranks):
            memory, _ = window.Shared_query(place)
            views[rank] = np.frombuffer(memory, np.uint8, self.sizes[rank]) if self.sizes[rank] else _EMPTY
        return views


_EMPTY = np.zeros(0, np.uint8)

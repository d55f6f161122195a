"""MPI from its start to its end: ranks, nodes, small collectives on bytes, each with a time limit.

Used by the roles at their start and end, and by `engine`. Importing this module loads no MPI;
World.start() does. Nothing is pickled. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from transport.errors import WorldError
from transport.threads import start_thread

DEFAULTS = {
    # ob1 is the layer that ULFM works with. Its one-sided ucx component only prints an error here.
    "ft": {"pml": "ob1", "osc": "^ucx"},
    # UCX is off by default without an RDMA device: "any" turns it on for whatever there is.
    "fast": {"pml": "ucx", "osc": "^rdma", "opal_common_ucx_tls": "any", "opal_common_ucx_devices": "any"},
}
"""Open MPI parameters by launch profile. Parameters that the user has set (environment, --mca) stay."""

COLLECTIVE_MAX_BYTES = 64 * 2**20
"""Most bytes of all ranks together in one of the small collectives."""

_ULFM = "OMPI_MCA_mpi_ft_enable"
"""The variable that `mpirun --with-ft ulfm` sets for its ranks."""

_LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")


def launched() -> bool:
    """Tell whether this process was started by mpirun or another MPI launcher."""
    return any(name in os.environ for name in _LAUNCHED)


def set_defaults(profile: str) -> None:
    """Put the profile's parameters into the environment, before MPI is loaded.

    Raises WorldError for an unknown profile.
    """
    if profile not in DEFAULTS:
        raise WorldError(f"profile {profile!r} is unknown; use {' or '.join(DEFAULTS)}")
    for name, value in DEFAULTS[profile].items():
        os.environ.setdefault(f"OMPI_MCA_{name}", value)
    if not launched():
        # Alone, Open MPI leaves its shared-memory file behind; over `self` it makes none.
        os.environ.setdefault("OMPI_MCA_btl", "self")


def _finalize_without_gil(mpi: Any) -> None:
    """Call MPI_Finalize by ctypes, which releases the interpreter.

    mpi4py's call holds it. If it waited for a dead rank, it would stop every thread of this process, even the
    one with the time limit.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    libraries = {line.split()[-1] for line in lines if "/libmpi.so" in line or "/libmpich.so" in line}
    for library in libraries:
        if not mpi.Is_finalized():
            ctypes.CDLL(library).MPI_Finalize()
    if not mpi.Is_finalized():
        mpi.Finalize()


class World:
    """All ranks of this job. One per process, made by start().

    rank, size      of this process, among all
    node_of         (size,) list of int: which node each rank is on, numbered from 0 by first rank
    hostnames       (size,) list of str: the name of each rank's host
    comm            mpi4py communicator of all ranks; errors are returned as exceptions
    node_comm       of the ranks of this node, in the same order
    """

    def __init__(self, mpi: Any, limit_s: float):
        self.mpi = mpi
        self.limit_s = limit_s
        self.comm = mpi.COMM_WORLD
        self.comm.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self._lock = threading.Lock()
        self._to_free: list[Callable[[], object]] = []
        self._finished: bool | None = None
        self._unended: list[Any] = []
        self.barrier()  # by sleeping: the others may still be loading, and a blocking call would spin
        self.node_comm = self.comm.Split_type(mpi.COMM_TYPE_SHARED, key=self.rank)
        self.node_comm.Set_errhandler(mpi.ERRORS_RETURN)
        leaders = [int(first) for first in self.allgather_bytes(self._node_leader())]
        order = {leader: node for node, leader in enumerate(dict.fromkeys(leaders))}
        self.node_of = [order[leader] for leader in leaders]
        self.hostnames = [name.decode() for name in self.allgather_bytes(socket.gethostname().encode())]

    @classmethod
    def start(cls, profile: str = "ft", limit_s: float = 60.0) -> World:
        """Load and initialise MPI with the parameters of this profile; collective.

        limit_s     for each collective step here and later
        Raises WorldError when MPI is missing, too old, or the other ranks do not come.
        """
        set_defaults(profile)
        try:
            import mpi4py

            mpi4py.rc.thread_level = "multiple"
            mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise WorldError(f"MPI cannot be loaded: {error}; install mooncake-lite[mpi]") from None
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise WorldError("this MPI does not give MPI_THREAD_MULTIPLE; use Open MPI 5")
        return cls(MPI, limit_s)

    @property
    def one_node(self) -> bool:
        """Tell whether all ranks share one node."""
        return len(set(self.node_of)) == 1

    @property
    def survives_a_rank(self) -> bool:
        """Tell whether the others outlive a killed rank (ULFM): then no window may span the nodes."""
        return os.environ.get(_ULFM, "0").lower() not in ("0", "f", "false", "n", "no", "disabled")

    @property
    def node_ranks(self) -> list[int]:
        """Return the ranks of this node, ascending; position i is rank i of node_comm."""
        return [rank for rank in range(self.size) if self.node_of[rank] == self.node_of[self.rank]]

    def failed_ranks(self) -> list[int]:
        """Return the ranks that MPI knows to have failed, on any node (ULFM). Takes 0.1 ms.

        Empty where MPI does not outlive them. A failed rank may still run if its node was lost.
        """
        if not self.survives_a_rank:
            return []
        self.comm.Iprobe(self.rank, 0)  # only to let MPI hear of them
        failed, everyone = self.comm.Get_failed(), self.comm.Get_group()
        ranks = list(failed.Translate_ranks(list(range(failed.Get_size())), everyone))
        failed.Free()
        everyone.Free()
        return ranks

    def barrier(self) -> None:
        """Wait for all ranks without spinning. Raises WorldError after limit_s."""
        self._complete(self.comm.Ibarrier(), "barrier")

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Return the data of each rank, by rank. Lengths may differ; at most COLLECTIVE_MAX_BYTES in all.

        Raises WorldError when they are more, or other ranks do not come within limit_s.
        """
        import numpy as np

        lengths = np.zeros(self.size, np.int64)
        self._complete(self.comm.Iallgather(np.array([len(data)], np.int64), lengths), "allgather")
        total = int(lengths.sum())
        if total > COLLECTIVE_MAX_BYTES:
            raise WorldError(f"allgather of {total} bytes, the limit is {COLLECTIVE_MAX_BYTES}")
        ends = np.cumsum(lengths)
        received = np.empty(max(total, 1), np.uint8)
        layout = [received, lengths.tolist(), (ends - lengths).tolist(), self.mpi.BYTE]
        self._complete(self.comm.Iallgatherv([data, self.mpi.BYTE], layout), "allgather")
        return [received[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]

    def bcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """Return the bytes of rank `root`, at every rank; the others pass None.

        Raises WorldError as allgather_bytes does.
        """
        import numpy as np

        mine = data if self.rank == root and data is not None else b""
        length = np.array([len(mine)], np.int64)
        self._complete(self.comm.Ibcast(length, root), "broadcast")
        if length[0] > COLLECTIVE_MAX_BYTES:
            raise WorldError(f"broadcast of {length[0]} bytes, the limit is {COLLECTIVE_MAX_BYTES}")
        buffer = np.empty(max(int(length[0]), 1), np.uint8)
        buffer[: len(mine)] = np.frombuffer(mine, np.uint8)
        self._complete(self.comm.Ibcast(buffer, root), "broadcast")
        return buffer[: length[0]].tobytes()

    def comm_of(self, ranks: Sequence[int]) -> Any:
        """Return a new communicator of some ranks, each of which calls this at the same time."""
        group = self.comm.Get_group().Incl(list(ranks))
        return self.comm.Create_group(group)

    def free_at_finish(self, free: Callable[[], object]) -> None:
        """Call this collective clean-up in finish(), last first, unless a rank was lost."""
        self._to_free.append(free)

    def finish(self, limit_s: float = 3.0, lost: bool = False) -> bool:
        """End MPI; True when it ended within limit_s. If not, the caller leaves with os._exit().

        lost    a rank has died: windows and communicators are not freed, which would wait for it
        MPI is ended in a thread of its own, because it waits for ranks that may never come.
        May be called twice; the second call returns what the first did.
        """
        with self._lock:
            if self._finished is None:
                ended = threading.Event()
                start_thread("finalize", self._finalize, lost, ended)
                self._finished = ended.wait(limit_s)
            return self._finished

    def _finalize(self, lost: bool, ended: threading.Event) -> None:
        try:
            if not lost:
                self.barrier()  # by sleeping: the windows' own barriers spin
                for free in reversed(self._to_free):
                    free()
            _finalize_without_gil(self.mpi)
        except (self.mpi.Exception, WorldError):
            return  # not ended in order: finish() says so
        ended.set()

    def _node_leader(self) -> bytes:
        import numpy as np

        leader = np.array([self.rank], np.int64)
        self._complete(self.node_comm.Ibcast(leader, 0), "broadcast on the node")
        return str(int(leader[0])).encode()

    def _complete(self, request: Any, what: str) -> None:
        """Wait for an MPI request by testing and sleeping.

        A blocking call would take the core from a computing rank. Raises WorldError after limit_s, or when
        MPI reports a failure.
        """
        start = time.monotonic()
        pause_s = 0.00005
        try:
            while not request.Test():
                if time.monotonic() - start > self.limit_s:
                    self._unended.append(request)  # with its buffers, into which MPI may still write
                    raise WorldError(f"rank {self.rank}: {what} did not end within {self.limit_s:g} s")
                time.sleep(pause_s)
                pause_s = min(0.005, pause_s * 1.5)
        except self.mpi.Exception as error:
            raise WorldError(f"rank {self.rank}: {what} failed: {error}") from None


def wait_for_end(threads: Iterable[threading.Thread], limit_s: float) -> None:
    """Wait until the threads have ended or limit_s has passed.

    join() returns a moment before a thread is gone, and MPI frees the thread's data in that moment.
    """
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        while Path(f"/proc/self/task/{thread.native_id}").exists() and time.monotonic() < deadline:
            time.sleep(0.0001)

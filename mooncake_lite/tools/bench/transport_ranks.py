"""Reads between ranks, beside a message of MPI and beside the simplest way to move the same bytes.

Ranks under mpirun run this file (`bench.transport` starts them): four on one node, or one on each of two.
Rank 0 writes the rows. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mooncake_lite.launch.rank_process import die_with_parent, forget_shared_memory
from mooncake_lite.tools.bench.result import Other, Row, median_seconds
from transport.engine import Transfer, TransferEngine
from transport.exchange import Exchange, MpiExchange, SharedExchange
from transport.messaging.address import reachable_address
from transport.threads import start_thread
from transport.world import World

KIB, MIB = 2**10, 2**20
SEGMENT_BYTES = 64 * MIB
LIMIT_S = 10.0

TOGETHER, TOGETHER_BYTES, REPEATS = 64, 256 * KIB, 4
"""Reads that each of four ranks has under way at once, the size of each, and how often all are made."""

ROUNDS = 5
"""Between two nodes, of which the median counts."""

ASKED, ALLREDUCE = "MPI request and reply", "MPI_Allreduce, spinning"
COPY, SOCKET = "np.copyto from the same window (median)", "one plain TCP socket (median)"

Seconds = tuple[float, float, float]
"""Of ours, of the limit, and of the peer, or 0 without one."""

MEMBERS, SUMS, SUM_FLOATS, PIECE_BYTES = 2, 301, (576, 256 * KIB), 256 * KIB
"""Ranks that add in lockstep, how often, how many float32, and the size of a piece in common memory."""


class Reads:
    """One rank of the measurement. Rank 0 reads from rank 1; the figures of other ranks mean nothing."""

    def __init__(self, world: World, engine: TransferEngine, quick: bool) -> None:
        self.world, self.engine, self.quick = world, engine, quick
        self.out = np.ones(SEGMENT_BYTES, np.uint8)  # every page is there
        self.source = self.out  # of messages

    def alone(self, runs: int, count: int, size: int, plain: Callable[[], object]) -> tuple[float, float]:
        """Median seconds of count ranges of size bytes, and of a plain way, while no rank spins in MPI."""
        places = [slice(at * size, (at + 1) * size) for at in range(count)]
        transfers = [Transfer("read", self.out[place], 1, 0, place.start, size) for place in places]
        ours, theirs = 1.0, 1.0
        self.world.barrier()
        if self.world.rank == 0:
            ours, theirs = median_seconds(runs, lambda: self.engine.submit(transfers).wait(LIMIT_S), plain)
        self.world.barrier()
        return ours, theirs

    def sums(self, make: Callable[[Any], Exchange], plain: Callable[[int], object], limit: str) -> list[Row]:
        """Return the rows of sums by MEMBERS ranks.

        make    returns this member's exchange, given a communicator of the members
        plain   moves so many bytes in the plain way that `limit` names
        """
        comm = self.world.comm.Split(self.world.rank < MEMBERS, self.world.rank)
        exchange = make(comm) if self.world.rank < MEMBERS else None
        where = "same node" if self.world.one_node else "two nodes"
        ours, asked, bound, rows = 1.0, 1.0, 1.0, []
        for floats in SUM_FLOATS:
            x, total = np.zeros((2, floats), np.float32)
            self.world.barrier()
            if exchange is not None:
                sums = partial(exchange.sum, x), partial(comm.Allreduce, x, total)
                ours, asked = median_seconds(SUMS, *sums)
            if self.world.rank == 0:
                (bound,) = median_seconds(SUMS, partial(plain, x.nbytes))
            self.world.barrier()
            name = f"exchange of {MEMBERS} members, a sum of {floats:,} float32, {where}"
            rows.append(read_row(name, x.nbytes, (ours, bound, asked), limit, SUMS, ALLREDUCE))
        return rows

    def messages(self, nbytes: int, runs: int) -> float:
        """Median seconds until the bytes are there that rank 0 has asked rank 1 for: a read without windows.

        A sender that is not asked runs ahead, and a receive would time the last copy alone.
        """
        from mpi4py import MPI

        out, source, request = self.out[:nbytes], self.source[:nbytes], np.empty(0, np.uint8)
        comm = MPI.COMM_WORLD

        def ask() -> None:
            comm.Send(request, dest=1)
            comm.Recv(out, source=1)

        def answer() -> None:
            comm.Recv(request, source=0)
            comm.Send(source, dest=0)

        if self.world.rank > 1:
            return 0.0
        return median_seconds(runs, ask if self.world.rank == 0 else answer)[0]


def read_row(name: str, nbytes: int, seconds: Seconds, limit: str, runs: int, peer_name: str = ASKED) -> Row:
    """Return the row of a read or a sum."""
    unit = "us" if nbytes < 64 * KIB else "GB/s"
    figure = (lambda s: s * 1e6) if unit == "us" else (lambda s: nbytes / 1e9 / s)
    ours, bound, asked = seconds
    peer = Other(peer_name, figure(asked)) if asked else None
    return Row(name, unit, figure(ours), peer, Other(limit, figure(bound)), runs)


class Near(Reads):
    """Ranks of one node, beside a plain copy out of the same window."""

    def __init__(self, world: World, engine: TransferEngine, quick: bool) -> None:
        super().__init__(world, engine, quick)
        self.source = engine._near[(world.rank + 1) % world.size]

    def rows(self) -> list[Row]:
        """Measure; all ranks call this together."""
        sizes = {"4 KiB": 4 * KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB}
        return [
            *(self._reads(f"read {name}", 1, size) for name, size in sizes.items()),
            self._reads("read 16 x 1 MiB in one batch", 16, MIB),
            self._reads("read 3,000 x 12 KiB in one batch", 3000, 12 * KIB),
            self._together(),
            *self.sums(self._exchange, lambda n: np.copyto(self.out[:n], self.source[:n]), COPY),
        ]

    def _exchange(self, comm: Any) -> Exchange:
        """Over the end of rank 0's segment, where all bytes are 0 at first."""
        memory = self.engine._near[0][-SharedExchange.nbytes(MEMBERS, PIECE_BYTES) :]
        return SharedExchange(memory, comm.Get_rank(), MEMBERS, LIMIT_S)

    def _reads(self, name: str, count: int, size: int) -> Row:
        nbytes = count * size
        runs = max(9, min(2001, 2**29 // nbytes | 1) // (8 if self.quick else 1))
        target, source = self.out[:nbytes], self.source[:nbytes]
        ours, copy = self.alone(runs, count, size, lambda: np.copyto(target, source))
        asked = self.messages(nbytes, runs) if count == 1 else 0.0
        return read_row(f"{name}, same node", nbytes, (ours, copy, asked), COPY, runs)

    def _together(self) -> Row:
        """All ranks at once, each from its neighbour: separate batches, all under way, then waited for."""
        pieces = [slice(at * TOGETHER_BYTES, (at + 1) * TOGETHER_BYTES) for at in range(TOGETHER)]
        other = (self.world.rank + 1) % self.world.size
        transfers = [Transfer("read", self.out[p], other, 0, p.start, TOGETHER_BYTES) for p in pieces]

        def read() -> None:
            batches = [self.engine.submit([transfer]) for transfer in transfers]
            for batch in batches:
                batch.wait(LIMIT_S)

        def copy() -> None:
            for piece in pieces:
                np.copyto(self.out[piece], self.source[piece])

        runs = 7 if self.quick else 21
        ours, limit = ([self._all_at_once(action) for _ in range(runs)] for action in (read, copy))
        gb = self.world.size * TOGETHER * TOGETHER_BYTES * REPEATS / 1e9
        bound = Other("four processes with np.copyto", gb / statistics.median(limit))
        name = f"{TOGETHER} concurrent reads of 256 KiB from each of {self.world.size} ranks"
        return Row(name, "GB/s", gb / statistics.median(ours), None, bound, runs)

    def _all_at_once(self, action: Callable[[], None]) -> float:
        """Seconds from the moment at which all begin until the last has done it REPEATS times."""
        moment = self.world.bcast_bytes(msgspec.json.encode(time.monotonic() + 0.02))
        start = msgspec.json.decode(moment, type=float)
        time.sleep(max(0.0, start - time.monotonic()))
        for _ in range(REPEATS):
            action()
        ends = self.world.allgather_bytes(msgspec.json.encode(time.monotonic()))
        return max(msgspec.json.decode(end, type=float) for end in ends) - start


class Far(Reads):
    """A rank on each of two nodes, beside a plain TCP socket of the same size."""

    def __init__(self, world: World, engine: TransferEngine, quick: bool) -> None:
        super().__init__(world, engine, quick)
        self.wire = self._plain_socket()

    def _plain_socket(self) -> socket.socket:
        """Connected to a thread of rank 1 that sends as many bytes as it is asked for."""
        world = self.world
        listener = socket.create_server((reachable_address([world.hostnames[1 - world.rank]]), 0))
        cards = world.allgather_bytes(msgspec.json.encode(listener.getsockname()))
        if world.rank == 1:
            start_thread("answers", self._answer, listener)
        wire = socket.create_connection(tuple(msgspec.json.decode(cards[1])), LIMIT_S)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.settimeout(None)
        return wire

    def _answer(self, listener: socket.socket) -> None:
        """Rank 0's connection first; rank 1's own, which nobody uses, comes and waits in the queue."""
        source = memoryview(bytes(SEGMENT_BYTES))
        while True:
            connection, _ = listener.accept()
            start_thread("sends", self._send, connection, source)

    @staticmethod
    def _send(connection: socket.socket, source: memoryview) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(request := connection.recv(8)) == 8:
            connection.sendall(source[: int.from_bytes(request, "big")])

    def rows(self) -> list[Row]:
        """Measure; both ranks call this together."""
        sizes = {"4 KiB": 4 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB}
        return [
            *(self._reads(f"read {name}", 1, size) for name, size in sizes.items()),
            self._reads("read 3,000 x 12 KiB in one batch", 3000, 12 * KIB),
            *(self.sums(MpiExchange, self._over_socket, SOCKET) if self.world.survives_a_rank else ()),
        ]

    def _reads(self, name: str, count: int, size: int) -> Row:
        nbytes = count * size
        runs = max(3, min(800, 2**28 // nbytes) // (4 if self.quick else 1) // ROUNDS)
        found = []
        for _ in range(ROUNDS):
            alone = self.alone(runs, count, size, lambda: self._over_socket(nbytes))
            found.append((*alone, self.messages(nbytes, runs)))
        ours, wire, asked = map(statistics.median, zip(*found))
        name = f"{name}, two nodes ({self.engine.path_to(1 - self.world.rank, nbytes)})"
        return read_row(name, nbytes, (ours, wire, asked), SOCKET, ROUNDS * runs)

    def _over_socket(self, nbytes: int) -> None:
        self.wire.sendall(nbytes.to_bytes(8, "big"))
        view, got = self.out.data[:nbytes], 0
        while got < nbytes:
            got += self.wire.recv_into(view[got:])


KINDS: dict[str, type[Near | Far]] = {"near": Near, "far": Far}


def main() -> None:
    """`python -m MODULE FILE near|far quick|full [PATH]`: rank 0 writes its rows to FILE.

    PATH    the one path between ranks, instead of the fastest
    """
    result, kind, speed = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    die_with_parent()
    world = World.start()
    engine = TransferEngine(world, SEGMENT_BYTES, path="".join(sys.argv[4:]))
    forget_shared_memory()
    engine.local[:] = world.rank
    world.barrier()
    rows = KINDS[kind](world, engine, speed == "quick").rows()
    if world.rank == 0:
        result.write_bytes(msgspec.json.encode(rows))
    world.barrier()
    engine.close()
    world.finish()


if __name__ == "__main__":
    main()

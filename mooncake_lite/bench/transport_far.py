"""Reads between two nodes, beside a message of MPI and beside a plain TCP socket of the same size.

Two ranks under mpirun, each on a node of its own, run this file (`bench.transport` starts them); rank 0
writes the rows. Explained in docs/explain/transport.md.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable

import msgspec
import numpy as np

from mooncake_lite.bench.result import Other, Row, median_seconds
from mooncake_lite.bench.transport_rank import SEGMENT_BYTES, main
from transport.address import reachable_address
from transport.engine import Transfer, TransferEngine
from transport.threads import start_thread
from transport.world import World

MIB = 2**20
SIZES = {"4 KiB": 4096, "1 MiB": MIB, "16 MiB": 16 * MIB}
SMALL_RANGES, SMALL_BYTES = 3000, 12 * 1024
ROUNDS = 5
LIMIT_S = 10.0
LIMIT = "one plain TCP socket (median)"


class Far:
    """One rank of the measurement; rank 0 asks, rank 1 answers."""

    def __init__(self, world: World, engine: TransferEngine, quick: bool):
        self.world, self.engine, self.quick = world, engine, quick
        self.out = np.ones(SEGMENT_BYTES, np.uint8)
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
        """All rows; at rank 1 they mean nothing."""
        one = [self._reads(f"read {name}, two nodes", 1, size) for name, size in SIZES.items()]
        name = f"read {SMALL_RANGES:,} x 12 KiB in one batch, two nodes"
        return [*one, self._reads(name, SMALL_RANGES, SMALL_BYTES)]

    def _reads(self, name: str, count: int, size: int) -> Row:
        nbytes = count * size
        runs = max(3, min(800, 2**28 // nbytes) // (4 if self.quick else 1) // ROUNDS)
        found = [self._round(count, size, runs) for _ in range(ROUNDS)]
        ours, wire, asked = (statistics.median(seconds) for seconds in zip(*found, strict=True))
        unit = "us" if nbytes < 65536 else "GB/s"
        figure = (lambda s: s * 1e6) if unit == "us" else (lambda s: nbytes / 1e9 / s)
        name = f"{name} ({self.engine.path_to(1 - self.world.rank, nbytes)})"
        peer = Other("MPI request and reply", figure(asked))
        return Row(name, unit, figure(ours), peer, Other(LIMIT, figure(wire)), ROUNDS * runs)

    def _round(self, count: int, size: int, runs: int) -> tuple[float, float, float]:
        """Median seconds of ours, of the plain socket and of MPI; nobody spins in MPI in the first two."""
        ours, wire = 1.0, 1.0
        self.world.barrier()
        if self.world.rank == 0:
            ours, wire = median_seconds(
                runs, self._read(count, size), lambda: self._over_socket(count * size)
            )
        self.world.barrier()
        return ours, wire, self._messages(count * size, runs)

    def _read(self, count: int, size: int) -> Callable[[], None]:
        places = [slice(at * size, (at + 1) * size) for at in range(count)]
        transfers = [Transfer("read", self.out[place], 1, 0, place.start, size) for place in places]
        return lambda: self.engine.submit(transfers).wait(LIMIT_S)

    def _over_socket(self, nbytes: int) -> None:
        self.wire.sendall(nbytes.to_bytes(8, "big"))
        view, got = self.out.data[:nbytes], 0
        while got < nbytes:
            got += self.wire.recv_into(view[got:])

    def _messages(self, nbytes: int, runs: int) -> float:
        """Seconds until the bytes are there that rank 0 has asked rank 1 for."""
        from mpi4py import MPI

        out, request = self.out[:nbytes], np.empty(0, np.uint8)
        comm = MPI.COMM_WORLD

        def ask() -> None:
            comm.Send(request, dest=1)
            comm.Recv(out, source=1)

        def answer() -> None:
            comm.Recv(request, source=0)
            comm.Send(out, dest=0)

        return median_seconds(runs, ask if self.world.rank == 0 else answer)[0]


if __name__ == "__main__":
    main(Far)

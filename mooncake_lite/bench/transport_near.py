"""Reads on one node, beside MPI messages and beside a plain copy out of the same window.

Four ranks under mpirun run this file (`bench.transport` starts them); rank 0 writes the rows. Explained in
docs/explain/transport.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import numpy as np

from mooncake_lite.bench.result import Other, Row, median_seconds
from mooncake_lite.bench.transport_rank import SEGMENT_BYTES, main
from transport.engine import Transfer, TransferEngine
from transport.world import World

MIB = 2**20
TOGETHER, TOGETHER_BYTES = 64, 256 * 1024
"""Reads that each of four ranks has under way at once, and the size of each."""

LIMIT_S = 10.0
LIMIT = "np.copyto from the same window (median)"


class Near:
    """One rank of the measurement: reads go from rank 1, of what rank 0 has under way alone."""

    def __init__(self, world: World, engine: TransferEngine, quick: bool):
        self.world, self.engine, self.quick = world, engine, quick
        self.window = engine._near[(world.rank + 1) % world.size]
        self.out = np.ones(SEGMENT_BYTES, np.uint8)  # every page is there

    def rows(self) -> list[Row]:
        """All rows; at ranks other than 0 they mean nothing."""
        one = [self._reads(f"read {name}, same node", 1, size) for name, size in SIZES.items()]
        return [
            *one,
            self._reads("read 16 x 1 MiB in one batch, same node", 16, MIB),
            self._reads("read 3,000 x 12 KiB in one batch, same node", 3000, 12 * 1024),
            self._together(),
        ]

    def _reads(self, name: str, count: int, size: int) -> Row:
        """count ranges of size bytes by rank 0 from rank 1, while nobody spins in a message."""
        runs = max(9, min(2001, 2**29 // (count * size) | 1) // (8 if self.quick else 1))
        first = self.world.rank == 0
        self.world.barrier()
        ours, copy = (
            median_seconds(runs, self._read(count, size), self._copy(count, size)) if first else (1.0, 1.0)
        )
        self.world.barrier()
        asked = self._messages(count * size, runs) if count == 1 else 0.0
        self.world.barrier()
        nbytes = count * size
        unit = "us" if nbytes < 65536 else "GB/s"
        figure = (lambda s: s * 1e6) if unit == "us" else (lambda s: nbytes / 1e9 / s)
        peer = Other("MPI request and reply", figure(asked)) if asked else None
        return Row(name, unit, figure(ours), peer, Other(LIMIT, figure(copy)), runs)

    def _read(self, count: int, size: int) -> Callable[[], None]:
        step = min(size, SEGMENT_BYTES // count)
        transfers = [
            Transfer("read", self.out[at * step : at * step + size], 1, 0, at * step, size)
            for at in range(count)
        ]
        return lambda: self.engine.submit(transfers).wait(LIMIT_S)

    def _copy(self, count: int, size: int) -> Callable[[], None]:
        """The same bytes into the same places."""
        nbytes = count * size
        target, source = self.out[:nbytes], self.window[:nbytes]
        return lambda: np.copyto(target, source)

    def _messages(self, size: int, runs: int) -> float:
        """Seconds until the bytes are there that rank 0 has asked rank 1 for: a read without windows.

        A sender that is not asked runs ahead, and a receive would time the last copy alone.
        """
        from mpi4py import MPI

        out, source, request = self.out[:size], self.window[:size], np.empty(0, np.uint8)
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
                np.copyto(self.out[piece], self.window[piece])

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


SIZES = {"4 KiB": 4096, "64 KiB": 65536, "1 MiB": MIB, "16 MiB": 16 * MIB}
REPEATS = 4


if __name__ == "__main__":
    main(Near)

"""What each rank of a transport benchmark does around its measurement: MPI, an engine, the rows at the end.

Used by `transport_near` and `transport_far`, which are run under mpirun. Explained in
docs/explain/transport.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from mooncake_lite.bench.result import Row
from mooncake_lite.launch.rank_process import die_with_parent, forget_shared_memory
from transport.engine import TransferEngine
from transport.world import World

SEGMENT_BYTES = 64 * 2**20


class Measurement(Protocol):
    """One rank's part; all ranks call rows() together."""

    def rows(self) -> list[Row]:
        """The rows, at rank 0."""


def main(measurement: Callable[[World, TransferEngine, bool], Measurement]) -> None:
    """`python -m MODULE FILE quick|full [PATH]`: rank 0 writes its rows to FILE; segments hold their rank.

    PATH    the one path between ranks, instead of the fastest
    """
    result, quick = Path(sys.argv[1]), sys.argv[2] == "quick"
    die_with_parent()
    world = World.start()
    engine = TransferEngine(world, SEGMENT_BYTES, path="".join(sys.argv[3:]))
    forget_shared_memory()
    engine.local[:] = world.rank
    world.barrier()
    rows = measurement(world, engine, quick).rows()
    if world.rank == 0:
        result.write_bytes(msgspec.json.encode(rows))
    world.barrier()
    engine.close()
    world.finish()

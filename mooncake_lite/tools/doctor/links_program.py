"""What every rank of `doctor --links` runs: each pair's paths are measured, one pair at a time.

Started by `mooncake_lite.tools.doctor.links` under mpirun; rank 0 writes the result. Explained in
docs/reference/cli.md.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from mooncake_lite.launch.rank_process import die_with_parent, forget_shared_memory
from transport.bulk.links import LARGE_BYTES, SMALL_BYTES
from transport.engine import Link, Transfer, TransferEngine
from transport.errors import TransferError
from transport.world import World

BUDGET_S = 20.0
"""Pairs that are not reached by then are left out."""

LIMIT_S = 5.0
SMALL_RUNS, LARGE_RUNS = 21, 5


class Pair(msgspec.Struct, frozen=True):
    """What `reader` gets from `source`.

    path         that a read of 8 MiB takes; secondary: of its second try, "" when it has none
    latency_us   of a read of 4 KiB, gb_per_s of one of 8 MiB, both medians; 0 when it failed, with `error`
    links        what the engine measured of each path to that node when it started
    """

    reader: int
    source: int
    path: str
    secondary: str
    latency_us: float
    gb_per_s: float
    links: list[Link]
    error: str = ""


class Found(msgspec.Struct, frozen=True):
    """The whole result: hosts by rank, nodes by rank, and the pairs that were measured."""

    hosts: list[str]
    nodes: list[int]
    pairs: list[Pair]


def pair(engine: TransferEngine, reader: int, source: int) -> Pair:
    """Measure one pair; called by the reader."""
    small, large = np.ones(SMALL_BYTES, np.uint8), np.ones(LARGE_BYTES, np.uint8)

    def seconds(buffer: np.ndarray, runs: int) -> float:
        taken = []
        for _ in range(1 + runs):  # the first one connects
            start = time.perf_counter()
            engine.submit([Transfer("read", buffer, source, 0, 0, buffer.nbytes)]).wait(LIMIT_S)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    path, *others = engine.ways_to(source, LARGE_BYTES)
    secondary = others[0] if others else ""
    links = [] if path == "shared" else engine.links_to(source)
    try:
        latency_s = seconds(small, SMALL_RUNS)
        rate = LARGE_BYTES / 1e9 / seconds(large, LARGE_RUNS)
    except TransferError as error:
        return Pair(reader, source, path, secondary, 0.0, 0.0, links, str(error))
    return Pair(reader, source, path, secondary, latency_s * 1e6, rate, links)


def main(result: Path) -> None:
    """What each rank runs."""
    die_with_parent()
    world = World.start(limit_s=BUDGET_S + 10)
    engine = TransferEngine(world, LARGE_BYTES)
    forget_shared_memory()
    world.barrier()
    started = time.monotonic()
    pairs: list[Pair] = []
    for reader in range(world.size):
        if world.rank == reader:
            for source in range(world.size):
                if source != reader and time.monotonic() - started < BUDGET_S:
                    pairs.append(pair(engine, reader, source))
        world.barrier()
    parts = world.allgather_bytes(msgspec.json.encode(pairs))
    if world.rank == 0:
        all_pairs = [found for part in parts for found in msgspec.json.decode(part, type=list[Pair])]
        result.write_bytes(msgspec.json.encode(Found(world.hostnames, world.node_of, all_pairs)))
    world.barrier()
    engine.close()
    world.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

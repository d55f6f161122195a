"""Two ranks: what a rank that closes, cancels or asks for odd numbers leaves behind. Usage: closes.py PATH

Rank 1 is asked, and serves nothing while it is deaf.
"""

import sys

import numpy as np
import pytest

from tests.patience import wait_until
from tests.transport.programs.harness import run
from transport.engine import Batch, Transfer, TransferEngine
from transport.errors import BadTransfer, EngineClosed, TransferCancelled
from transport.world import World

MIB = 2**20
LIMIT_S = 20.0


def numbers(engine: TransferEngine) -> None:
    """Those of NumPy are as good as others, and those that no message holds are refused by name."""
    got = np.zeros(9, np.uint8)
    rank, segment, at = np.int64(1), np.int32(0), np.uint32(7)
    engine.submit([Transfer("read", got, rank, segment, at, got.nbytes)]).wait(LIMIT_S)
    assert (got == 1).all()
    for segment, offset in ((2**63, 0), (5, 2**63), (5, 2**63 - 9)):
        with pytest.raises(BadTransfer, match="not within 0 to"):
            engine.submit([Transfer("read", got, 1, segment, offset, got.nbytes)])
    engine.submit([Transfer("read", got, 1, 0, 7, got.nbytes)]).wait(LIMIT_S)


def cancels(world: World, engine: TransferEngine) -> None:
    """In all moments of a transfer; afterwards neither side knows of it."""
    if world.rank == 0:
        for _ in range(20):
            into = [np.zeros(16 * 1024, np.uint8) for _ in range(128)]
            ranges = [
                Transfer("read", view, 1, 0, 16 * 1024 * at, view.nbytes) for at, view in enumerate(into)
            ]
            batch = engine.submit(ranges)
            batch.cancel()
            try:
                batch.wait(LIMIT_S)
            except TransferCancelled:
                continue
    world.barrier()
    if (courier := engine._remote._courier) is not None:
        assert wait_until(lambda: not courier._exchanges, LIMIT_S), "what was given up goes on"
    engine.check()
    world.barrier()


def closes(world: World, engine: TransferEngine) -> None:
    """Nothing is answered: what is under way, and its second try, end with the engine."""
    if world.rank == 1:
        if (courier := engine._remote._courier) is not None:
            courier._serve = lambda peer, request, now: None
        engine._remote.sockets.server._answer = lambda connection, request: None
    world.barrier()
    if world.rank == 0:
        got, ended = np.zeros(MIB, np.uint8), list[Batch]()
        batches = [engine.submit([Transfer("read", got, 1, 0, 0, got.nbytes)]) for _ in range(3)]
        for batch in batches:
            batch.add_done_callback(ended.append)
        engine.close()
        for batch in batches:
            with pytest.raises(EngineClosed):
                batch.wait(LIMIT_S)
        assert len(ended) == 3
        engine.check()
        with pytest.raises(EngineClosed):
            engine.submit([])
    world.barrier()


def main() -> None:
    world = World.start(limit_s=30)
    engine = TransferEngine(world, 4 * MIB, stall_s=60.0, path=sys.argv[1])
    engine.local[:] = world.rank
    world.barrier()
    if world.rank == 0:
        numbers(engine)
    world.barrier()
    cancels(world, engine)
    closes(world, engine)
    engine.close()
    assert world.finish(10), "MPI did not end"
    print(f"rank {world.rank} ok", flush=True)


if __name__ == "__main__":
    run(main)

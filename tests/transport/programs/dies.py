"""The last rank kills itself while others read from it; the survivors' other transfers are not touched.

Usage: dies.py told|untold PATH. "told": the survivors see the process end and call mark_lost.
"untold": they learn of it from MPI or from the time limit alone.
"""

import contextlib
import os
import signal
import sys
import time

import numpy as np
import pytest

from tests.patience import patient, wait_until
from tests.transport.programs.harness import run
from transport.engine import Transfer, TransferEngine
from transport.errors import PeerLost, TransferTimeout
from transport.messaging.pids import process_exists
from transport.world import World

MIB = 2**20
LIMIT_S = 15.0

STALL_S = {True: 5.0, False: 2.0}
"""By whether the survivors are told, or else have to find out by this silence."""


def read(engine: TransferEngine, rank: int, nbytes: int, timeout_s: float = LIMIT_S) -> np.ndarray:
    buffer = np.zeros(nbytes, np.uint8)
    engine.submit([Transfer("read", buffer, rank, 0, 0, nbytes)]).wait(timeout_s)
    return buffer


def survivors_exchange(world: World, engine: TransferEngine, victim: int) -> None:
    for rank in range(victim):
        assert (read(engine, rank, 4 * MIB) == rank).all()


def meet(world: World, engine: TransferEngine, survivors: range, *, leaving: bool = False) -> None:
    """A barrier of the survivors alone, by a flag of each in the segments of all.

    leaving   whoever has all flags may go at once, also before it has confirmed the last one
    """
    flag = np.full(1, 255, np.uint8)
    flags = engine.local.nbytes - 1 - survivors.stop * (1 + leaving)
    for rank in survivors:
        with contextlib.suppress(*([PeerLost, TransferTimeout] if leaving else [])):
            engine.submit([Transfer("write", flag, rank, 0, flags + world.rank, 1)]).wait(LIMIT_S)
    there = engine.local[flags : flags + survivors.stop]
    assert wait_until(lambda: (there == 255).all(), LIMIT_S), "the other survivors do not come"


def expect_loss(engine: TransferEngine, victim: int, told: bool) -> None:
    start = time.monotonic()
    if not told and engine.path_to(victim) == "shared":
        # The memory of a dead rank of this node can still be read: nobody said that it must not be.
        assert (read(engine, victim, 8 * MIB) == victim).all()
        return
    at_once = told or engine.path_to(victim) == "sockets"
    with pytest.raises(PeerLost if at_once else (PeerLost, TransferTimeout), match=str(victim)) as caught:
        read(engine, victim, 8 * MIB)
    assert caught.value.rank == victim, "the time limit was the caller's, not the engine's"
    assert time.monotonic() - start < (patient(STALL_S[told] / 2) if at_once else LIMIT_S)


def main() -> None:
    told = sys.argv[1] == "told"
    world = World.start(limit_s=20)
    victim = world.size - 1
    engine = TransferEngine(world, 8 * MIB, stall_s=STALL_S[told], path=sys.argv[2])
    engine.local[:] = world.rank
    pids = [int(pid) for pid in world.allgather_bytes(str(os.getpid()).encode())]
    world.barrier()
    if world.rank == victim:
        assert (read(engine, 0, MIB) == 0).all()
        os.kill(os.getpid(), signal.SIGKILL)
    # Some are under way when it dies; each must end, one way or the other.
    buffer = np.zeros(8 * MIB, np.uint8)
    under_way = [engine.submit([Transfer("read", buffer, victim, 0, 0, buffer.nbytes)]) for _ in range(8)]
    others = [(rank, np.zeros(4 * MIB, np.uint8)) for rank in range(victim) for _ in range(8)]
    load = [engine.submit([Transfer("read", to, rank, 0, 0, to.nbytes)]) for rank, to in others]
    assert wait_until(lambda: not process_exists(pids[victim]), LIMIT_S), "the victim does not end"
    if told:
        engine.mark_lost(victim, "its process ended")
    for batch in load:
        batch.wait(LIMIT_S)
    assert all((to == rank).all() for rank, to in others), "a transfer between survivors went wrong"
    survivors_exchange(world, engine, victim)
    for batch in under_way:
        with contextlib.suppress(PeerLost, TransferTimeout):
            batch.wait(LIMIT_S)
        assert batch.poll(), "a transfer with the dead rank never ended"
    expect_loss(engine, victim, told)
    survivors_exchange(world, engine, victim)
    meet(world, engine, range(victim))
    meet(world, engine, range(victim), leaving=True)
    print(f"rank {world.rank} survived", flush=True)
    engine.close()
    start = time.monotonic()
    ended = world.finish(3.0, lost=True)
    print(f"rank {world.rank} finish {ended} after {time.monotonic() - start:.1f} s", flush=True)
    assert time.monotonic() - start < patient(8)
    if not ended:
        os._exit(0)


if __name__ == "__main__":
    run(main)

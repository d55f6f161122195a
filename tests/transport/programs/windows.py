"""Two ranks, one-sided MPI over a network that needs the target's help, which comes or does not.

Rank 1 keeps out of MPI, but for what its courier does: it waits for a byte of its own segment.
Usage: windows.py [refused]
"""

import sys
import time

import numpy as np
import pytest

from tests.patience import patient, wait_until
from tests.transport.programs.harness import run
from transport.engine import Transfer, TransferEngine
from transport.errors import BadTransfer, PeerLost, TransferCancelled, TransferError, TransferTimeout
from transport.world import World

MIB = 2**20
STALL_S = patient(0.5)
LIMIT_S = 10.0


def tell(engine: TransferEngine, value: int) -> None:
    byte = np.full(1, value, np.uint8)
    engine.submit([Transfer("write", byte, 1, 0, engine.sizes[1] - 1, 1)]).wait(LIMIT_S)


def helped(engine: TransferEngine, number: int) -> None:
    """Ranges of all lengths arrive in both directions, while nobody at the target enters MPI unasked."""
    rng = np.random.default_rng(5)
    sent = rng.integers(0, 256, 3 * MIB, np.uint8)
    offsets = list(range(0, sent.nbytes, 9001))
    pieces = [(at, min(9001, sent.nbytes - at)) for at in offsets]
    engine.submit([Transfer("write", sent[at:], 1, 0, at, n) for at, n in pieces]).wait(LIMIT_S)
    for count in (1, 4096, 100_000, 3 * MIB):
        got = np.zeros(count, np.uint8)
        engine.submit([Transfer("read", got, 1, 0, 0, count)]).wait(LIMIT_S)
        assert np.array_equal(got, sent[:count])
    got = np.zeros(sent.nbytes, np.uint8)
    engine.submit([Transfer("read", got[at:], 1, 0, at, n) for at, n in reversed(pieces)]).wait(LIMIT_S)
    assert np.array_equal(got, sent)
    assert engine.counters["one_sided"]["failed"] == 0
    assert engine.counters["sockets"]["bytes_read"] == engine.counters["two_sided"]["bytes_read"] == 0
    late = np.zeros(MIB, np.uint8)
    engine.submit([Transfer("read", late, 1, number, 0, MIB)]).wait(LIMIT_S)
    assert (late == 77).all()
    assert engine.counters["sockets"]["bytes_read"] == MIB, "a segment without a window has another path"


def not_helped(engine: TransferEngine) -> None:
    """A target that never enters MPI: the limit ends the transfer, then the next ones at once."""
    courier = engine._remote._courier
    time.sleep(0.1)  # what help was asked for is over
    courier.help_from = lambda rank: None
    got = np.zeros(4096, np.uint8)

    def read() -> None:
        batch = engine.submit([Transfer("read", got, 1, 0, 0, got.nbytes)])
        try:
            batch.wait(LIMIT_S)
        finally:
            assert batch.poll()

    start = time.monotonic()
    batch = engine.submit([Transfer("read", got, 1, 0, 0, got.nbytes)])
    time.sleep(STALL_S / 5)  # what MPI has begun it does not take back
    batch.cancel()
    with pytest.raises(TransferCancelled):
        batch.wait(LIMIT_S)
    assert batch.may_still_land == {0}, "MPI takes nothing back"
    assert time.monotonic() - start < patient(STALL_S + 1)
    with pytest.raises(TransferError, match="rank 1 is stuck"):
        read()
    engine._remote._one_sided._stuck.clear()
    start = time.monotonic()
    with pytest.raises(TransferTimeout, match=f"read with rank 1: nothing moved for {STALL_S:g} s"):
        read()
    assert STALL_S < time.monotonic() - start < patient(2 * STALL_S + 1)
    engine.check()
    del courier.help_from
    engine._remote._one_sided._stuck.clear()


def main() -> None:
    world = World.start("fast", limit_s=30)
    assert not world.survives_a_rank
    engine = TransferEngine(world, 4 * MIB, stall_s=STALL_S, path="one_sided")
    number = engine.register(bytearray([76 + world.rank]) * MIB)
    world.barrier()
    if world.rank == 0:
        helped(engine, number)
        not_helped(engine)
        tell(engine, 1)
        engine.mark_lost(1, "for the test")
        with pytest.raises(PeerLost, match="for the test"):
            engine.submit([Transfer("read", bytearray(9), 1, 0, 0, 9)]).wait(LIMIT_S)
    else:
        assert wait_until(lambda: engine.local[-1] == 1, 3 * LIMIT_S), "the byte does not come"
    world.barrier()
    engine.close()
    engine.close()
    start = time.monotonic()
    assert world.finish(patient(5)), "MPI did not end"
    print(f"rank {world.rank} ok after {time.monotonic() - start:.1f} s", flush=True)


def refused() -> None:
    """Where a killed rank ends nobody, no window spans the ranks, and whoever insists hears it everywhere."""
    world = World.start("ft", limit_s=20)
    with pytest.raises(BadTransfer, match="--mpi-profile fast"):
        TransferEngine(world, MIB, path="one_sided")
    assert world.finish(patient(5))
    print(f"rank {world.rank} ok", flush=True)


if __name__ == "__main__":
    run(refused if sys.argv[1:] == ["refused"] else main)

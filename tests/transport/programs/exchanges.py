"""All ranks exchange over MPI; then they disagree, one is lost, and one does not come.

Usage: exchanges.py ft|fast. "ft": a loss that one rank tells ends the waits of all.
"""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.patience import patient
from tests.transport.programs.harness import run
from transport.errors import ExchangeError, MemberLost
from transport.exchange import MPI_FIRST_BYTES, MPI_PIECE_BYTES, TICK_S, MpiExchange
from transport.world import World

LENGTHS = [0, 1, 576, MPI_FIRST_BYTES // 4, MPI_FIRST_BYTES // 4 + 1]
LENGTHS += [(MPI_FIRST_BYTES + MPI_PIECE_BYTES) // 4, (MPI_FIRST_BYTES + MPI_PIECE_BYTES) // 4 + 1]


def data_of(member: int, length: int) -> np.ndarray:
    generator = np.random.default_rng((member, length))
    return (generator.standard_normal(length) * 10.0 ** generator.integers(-3, 4, length)).astype(np.float32)


def exchanges_are_right(exchange: MpiExchange) -> None:
    for length in LENGTHS:
        everyone = [data_of(member, length) for member in range(exchange.count)]
        x, total = everyone[exchange.member].copy(), everyone[0].copy()
        exchange.sum(x)
        for other in everyone[1:]:
            total = total + other
        assert x.tobytes() == total.tobytes(), f"the sum of {length}"
        mine = np.arange(length * exchange.member, dtype=np.int32)
        found = exchange.gather(mine)
        assert [each.tolist() for each in found] == [
            list(range(length * member)) for member in range(exchange.count)
        ]


def a_disagreement_is_told_to_all(exchange: MpiExchange) -> None:
    last = exchange.member == exchange.count - 1
    with pytest.raises(ExchangeError, match=r"a sum of 16 B of <f4 .* a gather of 3 B of \|u1"):
        exchange.gather(np.ones(3, np.uint8)) if last else exchange.sum(np.ones(4, np.float32))
    with pytest.raises(ExchangeError, match="has failed or has not ended"):
        exchange.sum(np.ones(4, np.float32))


def a_wait_ends(exchange: MpiExchange, all_know: bool) -> None:
    """The last one never comes. Rank 0 says so after a while, and with ULFM for all."""
    x = np.ones(4, np.float32)
    if exchange.member == exchange.count - 1:
        return
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(exchange.sum, x)
        if exchange.member == 0 or not all_know:
            time.sleep(0.3)
            assert not call.done()
            told = time.monotonic()
            exchange.lose("its process ended")
            assert isinstance(call.exception(20), MemberLost)
            assert time.monotonic() - told < patient(0.1)
        assert isinstance(call.exception(20), MemberLost)
        assert "did not come" not in str(call.exception())
    with pytest.raises(MemberLost):
        exchange.sum(x)


def a_killed_rank_is_noticed(exchange: MpiExchange) -> None:
    """By some it may be in the exchange that the killed one has still completed: MPI passes data on."""

    def two_sums() -> None:
        for _ in range(2):
            exchange.sum(np.ones(4, np.float32))
            if exchange.member == exchange.count - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    with pytest.raises(MemberLost):
        two_sums()
    assert time.monotonic() - began < patient(10.0)


def main() -> None:
    ft = sys.argv[1] == "ft"
    world = World.start(limit_s=20)
    comms = [world.comm.Dup() for _ in range(4)]
    first, second, third, fourth = (MpiExchange(comm, limit_s=8.0) for comm in comms)
    exchanges_are_right(first)
    asked: list[int] = []
    second._waits = lambda: asked.append(1)
    if world.rank == 0:
        time.sleep(0.3)
    began, used = time.monotonic(), time.thread_time()
    second.sum(np.ones(4, np.float32))
    took = time.monotonic() - began
    assert (1 if took > 0.2 else 0) <= len(asked) <= took / TICK_S, f"{len(asked)} calls in {took:.2f} s"
    assert time.thread_time() - used < 0.15, "it spins"
    a_disagreement_is_told_to_all(second)
    a_wait_ends(third, ft)
    first.close()
    with pytest.raises(MemberLost, match="the exchange is closed"):
        first.sum(np.ones(4, np.float32))
    print(f"rank {world.rank} of {len(set(world.node_of))} nodes exchanged", flush=True)
    if ft:
        a_killed_rank_is_noticed(fourth)
        print(f"rank {world.rank} survived", flush=True)
    if not world.finish(3.0, lost=True):
        os._exit(0)


if __name__ == "__main__":
    run(main)

"""Two nodes of two ranks: which path serves, what a second try, a cancel and a registered buffer do.

Rank 0 asks, the ranks of the other node answer; some of them are made deaf on one path on purpose.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from tests.patience import patient
from tests.transport.programs.harness import run
from transport.engine import Batch, Transfer, TransferEngine
from transport.errors import BadTransfer, TransferCancelled, TransferRefused, TransferTimeout
from transport.world import World

MIB = 2**20
STALL_S = patient(1.0)


def read(rank: int, nbytes: int, segment: int = 0, offset: int = 0) -> tuple[np.ndarray, Transfer]:
    buffer = np.zeros(nbytes, np.uint8)
    return buffer, Transfer("read", buffer, rank, segment, offset, nbytes)


def was_measured(world: World, engine: TransferEngine, seconds: float) -> None:
    assert seconds < patient(1.0), f"opening the engine took {seconds:.2f} s"
    for rank in range(world.size):
        near = world.node_of[rank] == world.node_of[world.rank]
        assert sorted(engine.ways_to(rank)) == (["shared"] if near else ["sockets", "two_sided"])
        assert (engine.path_to(rank) == "shared") == near
        for link in [] if near else engine.links_to(rank):
            assert link.bytes_per_s > 1e7
            assert 0 < link.latency_s < patient(0.1)


@contextmanager
def deaf(engine: TransferEngine, path: str) -> Iterator[threading.Event]:
    """Nothing that is asked of this rank over this path is answered meanwhile."""
    over = threading.Event()
    if path == "sockets":
        server = engine._remote.sockets.server
        server._answer = lambda connection, request: over.wait(20)
    else:
        courier = engine._remote._courier
        courier._serve = lambda peer, request, now: None
    yield over
    over.set()
    if path == "sockets":
        del server._answer
    else:
        del courier._serve


@contextmanager
def rank_3_deaf(world: World, engine: TransferEngine, *paths: str) -> Iterator[None]:
    """Every rank enters and leaves together; in between, rank 3 answers nothing on these paths."""
    world.barrier()
    with ExitStack() as stack:
        if world.rank == 3:
            for path in paths:
                stack.enter_context(deaf(engine, path))
        world.barrier()
        yield
        world.barrier()


def second_try(world: World, engine: TransferEngine, first: str, second: str) -> None:
    """Rank 3 is deaf on the first path; rank 0 gets its bytes over the second, and rank 2's undisturbed."""
    with rank_3_deaf(world, engine, first):
        if world.rank == 0:
            engine._remote.ways = lambda rank, nbytes: [first, second]
            before = engine.counters
            start = time.monotonic()
            buffer, transfer = read(3, MIB)
            slow = engine.submit([transfer, Transfer("write", buffer[:9], 3, 0, 2 * MIB + 100, 9)])
            assert engine._remote._queued[3] == MIB + 9
            while engine._remote._queued[3]:
                other, transfer = read(2, 100_000)
                engine.submit([transfer]).wait(10)
                assert (other == 2).all()
            slow.wait(STALL_S + 10)
            assert STALL_S * 0.9 < time.monotonic() - start < STALL_S + patient(8)
            assert (buffer == 3).all()
            after = engine.counters
            assert after[second]["retried"] == before[second]["retried"] + 2
            assert after[first]["failed"] == before[first]["failed"] + 2
            engine.check()
            del engine._remote.ways


def cancelled(world: World, engine: TransferEngine) -> None:
    """Nothing answers on either path: a cancelled batch ends long before a second try, a wait does not."""
    with rank_3_deaf(world, engine, "sockets", "two_sided"):
        if world.rank == 0:
            for path in ("sockets", "two_sided"):
                engine._remote.ways = lambda rank, nbytes, path=path: [path]
                _, transfer = read(3, MIB)
                batch = engine.submit([transfer])
                ended: list[Batch] = []
                batch.add_done_callback(ended.append)
                with pytest.raises(TransferTimeout, match="parts of the batch are not done"):
                    batch.wait(0.05)
                batch.cancel()
                with pytest.raises(TransferCancelled):
                    batch.wait(2 * STALL_S + 10)
                assert ended == [batch]
                assert engine._remote._queued[3] == 0
            del engine._remote.ways


def registered(world: World, engine: TransferEngine) -> None:
    """A buffer of each rank is a segment; all others read it, those of the same node too."""
    mine = bytearray([world.rank + 50]) * (3 * MIB)
    number = engine.register(mine, writable=world.rank != 1)
    with pytest.raises(BadTransfer, match=f"is part of segment {number} already"):
        engine.register(memoryview(mine)[5:9])
    with pytest.raises(BufferError):
        mine.append(0)
    numbers = [int(text) for text in world.allgather_bytes(str(number).encode())]
    pairs = [read(rank, 2 * MIB, numbers[rank], MIB) for rank in range(world.size)]
    engine.submit([transfer for _, transfer in pairs]).wait(10)
    assert [int(buffer[7]) for buffer, _ in pairs] == [50, 51, 52, 53]
    assert all((buffer == buffer[0]).all() for buffer, _ in pairs)
    assert len(set(world.allgather_bytes(b"read"))) == 1
    if world.rank == 0:
        for rank, segment, offset, why in (
            (1, numbers[1], 0, "read-only"),
            (3, 99, 0, "segment 99 is not exposed"),
            (2, numbers[2], 3 * MIB - 3, "outside the 3145728 bytes"),
        ):
            with pytest.raises(TransferRefused, match=why):
                engine.submit([Transfer("write", b"four", rank, segment, offset, 4)]).wait(5)
    world.barrier()
    engine.unregister(number)
    mine.append(0)
    with pytest.raises(BadTransfer, match=f"segment {number} is not exposed"):
        engine.unregister(number)
    with pytest.raises(BadTransfer, match="segment 0 stays"):
        engine.unregister(0)
    world.barrier()


def may_land(world: World, engine: TransferEngine) -> None:
    """Nothing answers on either path: of a write, sockets have sent the bytes, MPI waits to be told to."""
    with rank_3_deaf(world, engine, "sockets", "two_sided"):
        if world.rank == 0:
            under_way = []
            for path in ("sockets", "two_sided"):
                for op in ("read", "write"):
                    engine._remote.ways = lambda rank, nbytes, path=path: [path]
                    transfer = Transfer(op, bytearray(9), 3, 0, 3 * MIB, 9)
                    under_way.append((path, op, engine.submit([transfer])))
            del engine._remote.ways
            for path, op, batch in under_way:
                with pytest.raises(TransferTimeout, match="rank 3"):
                    batch.wait(4 * STALL_S + 10)
                sent = (path, op) == ("sockets", "write")
                assert batch.may_still_land == ({0} if sent else set()), (path, op)


async def awaited(engine: TransferEngine) -> None:
    pairs = [read(rank, 300_000) for rank in (1, 2, 3)]
    await asyncio.gather(*(engine.submit([transfer]).done(10) for _, transfer in pairs))
    assert [int(buffer[-1]) for buffer, _ in pairs] == [1, 2, 3]
    bad = engine.submit([Transfer("read", bytearray(4), 2, 77, 0, 4)])
    with pytest.raises(TransferRefused, match="segment 77"):
        await bad.done(10)


def thousands(engine: TransferEngine) -> None:
    ended: list[Batch] = []
    pairs = [read(rank % 4, 700, 0, 13 * rank) for rank in range(4000)]
    batches = [engine.submit([transfer]) for _, transfer in pairs]
    for batch in batches:
        batch.add_done_callback(ended.append)
    for batch in batches:
        batch.wait(20)
    assert len(ended) == 4000
    assert all((buffer == rank % 4).all() for rank, (buffer, _) in enumerate(pairs))
    engine.check()


def main() -> None:
    world = World.start(limit_s=20)
    start = time.monotonic()
    engine = TransferEngine(world, 4 * MIB, stall_s=STALL_S)
    seconds = time.monotonic() - start
    engine.local[: 2 * MIB] = world.rank
    world.barrier()
    was_measured(world, engine, seconds)
    world.barrier()
    if world.rank == 0:
        thousands(engine)
        asyncio.run(awaited(engine))
    registered(world, engine)
    second_try(world, engine, "sockets", "two_sided")
    second_try(world, engine, "two_sided", "sockets")
    cancelled(world, engine)
    may_land(world, engine)
    cpu = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - cpu < 0.1, "waiting takes a core"
    world.barrier()
    engine.check()
    assert world.rank == 0 or (engine.served_bytes["read"] > 0 and engine.serving_bytes == 0)
    engine.close()
    assert world.finish(patient(5)), "MPI did not end"
    print(f"rank {world.rank} ok", flush=True)


if __name__ == "__main__":
    run(main)

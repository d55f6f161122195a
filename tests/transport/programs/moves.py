"""Random reads and writes between all ranks; every byte is compared. Usage: moves.py SEED ROUNDS [PROFILE]

ROUNDS is how many times 10 random ranges of every rank are read over each path.
"""

import functools
import sys

import numpy as np
import pytest

from tests.patience import patient
from tests.transport.programs.harness import run
from transport.engine import Transfer, TransferEngine
from transport.errors import BadTransfer
from transport.world import World

MIB = 2**20
SIZES = [0, 1, 4096, 12 * 1024, 63 * 1024, 64 * 1024, 300_000, MIB, 5 * MIB + 3]


@functools.cache
def tile(rank: int) -> np.ndarray:
    """A prime number of random bytes, repeated: no shift by a page, a slice or a stripe goes unnoticed."""
    return np.resize(np.random.default_rng(rank).integers(0, 256, 100_003, np.uint8), 16 * MIB)


def pattern(rank: int, start: int, nbytes: int) -> np.ndarray:
    """Bytes start .. start+nbytes of what `rank` writes."""
    return tile(rank)[start : start + nbytes]


def ranges(rng: np.random.Generator, size: int, count: int) -> list[tuple[int, int]]:
    chosen = [min(int(rng.choice(SIZES)), size) for _ in range(count)]
    return [(int(rng.integers(0, size - nbytes + 1)), nbytes) for nbytes in chosen]


def read_everywhere(world: World, engine: TransferEngine, rng: np.random.Generator, rounds: int) -> None:
    for _ in range(rounds):
        wanted = [(rank, *some) for rank in range(world.size) for some in ranges(rng, engine.sizes[rank], 10)]
        buffers = [np.zeros(nbytes, np.uint8) for _, _, nbytes in wanted]
        transfers = [
            Transfer("read", buffer, rank, 0, offset, nbytes)
            for buffer, (rank, offset, nbytes) in zip(buffers, wanted)
        ]
        engine.submit(transfers).wait(20)
        for buffer, (rank, offset, nbytes) in zip(buffers, wanted):
            assert np.array_equal(buffer, pattern(rank, offset, nbytes)), (rank, offset, nbytes)


def write_everywhere(world: World, engine: TransferEngine) -> None:
    """Each rank writes its own stripe of each segment, half of it in small ranges."""
    transfers = []
    for rank, size in enumerate(engine.sizes):
        stripe = size // world.size
        start, half = world.rank * stripe, stripe // 2
        data = pattern(world.rank, start, stripe)
        transfers.append(Transfer("write", data[half:], rank, 0, start + half, stripe - half))
        for offset in range(0, half, 10_000):
            nbytes = min(10_000, half - offset)
            transfers.append(Transfer("write", data[offset:], rank, 0, start + offset, nbytes))
    engine.submit(transfers).wait(20)
    world.barrier()
    stripe = engine.local.nbytes // world.size
    for rank in range(world.size):
        found = engine.local[rank * stripe : (rank + 1) * stripe]
        assert np.array_equal(found, pattern(rank, rank * stripe, stripe)), rank


def between_segments(world: World, engine: TransferEngine) -> None:
    """From another rank's segment into the own one, without a buffer in between."""
    other = (world.rank + world.size - 1) % world.size
    nbytes = MIB  # the others are doing the same: they read the first MiB and write the last
    last = engine.local.nbytes - nbytes
    engine.submit([Transfer("read", (0, last), other, 0, 0, nbytes)]).wait(20)
    stripe = engine.sizes[other] // world.size
    expected = np.concatenate([pattern(rank, rank * stripe, stripe) for rank in range(world.size)])
    assert np.array_equal(engine.local[last:], expected[:nbytes])


def refuses_what_is_outside(world: World, engine: TransferEngine) -> None:
    other = (world.rank + 1) % world.size
    size = engine.sizes[other]
    buffer = np.zeros(100, np.uint8)
    for offset, nbytes in ((size - 99, 100), (-1, 10), (size + 1, 0), (0, -1)):
        with pytest.raises(BadTransfer, match=f"{size} bytes of rank {other}"):
            engine.submit([Transfer("read", buffer, other, 0, offset, nbytes)])


def main() -> None:
    seed, rounds = int(sys.argv[1]), int(sys.argv[2])
    world = World.start(*sys.argv[3:], limit_s=20)
    windows = [] if world.survives_a_rank else ["one_sided"]
    for path in ("", "two_sided", "sockets", *windows):
        move_over(world, path, np.random.default_rng([seed, world.rank]), rounds)
    assert world.finish(patient(5)), "MPI did not end"


def move_over(world: World, path: str, rng: np.random.Generator, rounds: int) -> None:
    # Sizes differ: nothing may assume a common one. All are larger than the largest range's slices.
    engine = TransferEngine(world, (6 + 2 * world.rank) * MIB + 4 * world.rank, path=path)
    engine.local[:] = pattern(world.rank, 0, engine.local.nbytes)
    world.barrier()
    read_everywhere(world, engine, rng, rounds)
    world.barrier()
    write_everywhere(world, engine)
    world.barrier()
    between_segments(world, engine)
    refuses_what_is_outside(world, engine)
    world.barrier()
    moved = " ".join(f"{name}={values['bytes_read']}" for name, values in engine.counters.items())
    control = engine.control_counters.get("bytes_out", 0)
    nodes = len(set(world.node_of))
    print(
        f"rank {world.rank} of {nodes} nodes, path {path or 'any'}: {moved} control={control} ok", flush=True
    )
    engine.check()
    world.barrier()
    engine.close()


if __name__ == "__main__":
    run(main)

"""The pool's books: ranges of a segment given and taken, and chains of keys looked up among a million blocks.

Run by `bench.store`. No bytes of KV are touched: this is what the conductor pays per request. The limit of a
lookup is what any directory in Python has to do, one dictionary access for each key.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array

import psutil

from mooncake_lite.bench.result import Other, Row, median_seconds
from store.allocator import Extent, RangeAllocator
from store.directory import Directory
from store.layout import BlockLayout
from store.objects import Wanted

LAYOUT = BlockLayout(30, 3, 64, 64, 4)
CHAIN = 250
"""Blocks of a prompt of 16,000 tokens."""
SEGMENTS = 4
FILL = 0.9
PAIRS = 20_000
ASKED = 200
"""Chains looked up in one run."""


def run(quick: bool) -> list[Row]:
    """Measure. Quick: with a tenth of the blocks, which are then closer at hand than a million are."""
    blocks, runs = (100_000, 5) if quick else (1_000_000, 9)
    return [*allocator(runs), *directory(blocks, runs)]


def allocator(runs: int) -> list[Row]:
    """Allocate/free pairs at 90 % fill, sizes log-uniform from 4 KiB to 4 MiB, and one size."""
    return [
        allocating("sizes 4 KiB to 4 MiB", 10, 2**30, runs),
        allocating("one size", 0, PAIRS * 4096, runs),
    ]


def allocating(name: str, octaves: int, capacity: int, runs: int) -> Row:
    """Sizes from 4 KiB on, log-uniform over so many octaves."""
    random_ = random.Random(0)
    sizes = [int(4096 * 2 ** (octaves * random_.random())) for _ in range(PAIRS)]
    ranges = RangeAllocator(capacity)
    held: list[tuple[Extent, ...]] = []
    churn(ranges, held, sizes, random_)  # until a steady state
    (seconds,) = median_seconds(runs, lambda: churn(ranges, held, sizes, random_))
    return Row(f"allocate and free, {name}, 90 % full", "pairs/s", PAIRS / seconds, None, None, runs)


def churn(
    ranges: RangeAllocator, held: list[tuple[Extent, ...]], sizes: list[int], random_: random.Random
) -> None:
    """Allocate each size once; before that free, at random, what would make it more than 90 %."""
    limit = FILL * ranges.capacity
    for nbytes in sizes:
        while ranges.used_bytes + nbytes > limit:
            at = int(random_.random() * len(held))
            held[at], held[-1] = held[-1], held[at]
            for offset, _ in held.pop():
                ranges.free(offset)
        extents = ranges.allocate_extents(nbytes)
        assert extents is not None, f"{nbytes} B refused with {ranges.free_bytes} B free"
        held.append(extents)


def directory(blocks: int, runs: int) -> list[Row]:
    """Lookups of random chains of a pool of so many blocks, and the memory that its books take."""
    random_ = random.Random(0)
    chains = [array("Q", (random_.getrandbits(64) for _ in range(CHAIN))) for _ in range(blocks // CHAIN)]
    gc.collect()
    before = psutil.Process().memory_info().rss
    books = Directory(LAYOUT)
    for rank in range(SEGMENTS):
        books.add_segment(rank, (blocks // SEGMENTS + CHAIN) * LAYOUT.nbytes, rank % 2)
    for number, chain in enumerate(chains):
        publish(books, f"request {number}", chain, float(number))
    gc.collect()
    per_block = (psutil.Process().memory_info().rss - before) / blocks

    name = f"{blocks:,} blocks"
    ours, bound = lookups(books, chains, runs, random_)
    limit = Other("one dictionary access for each key", bound)
    return [
        Row(f"directory lookup, chains of {CHAIN}, {name}", "keys/s", ours, None, limit, runs),
        Row(f"directory memory, {name}", "blocks/GiB", 2**30 / per_block, None, None, 1),
    ]


def lookups(
    books: Directory, chains: list[array[int]], runs: int, random_: random.Random
) -> tuple[float, float]:
    """Keys per second: ours, and those of a plain dictionary of the same keys; medians.

    The chains of each run are drawn anew, and their keys are new numbers, as out of a message.
    """
    plain = {key: key for chain in chains for key in chain.tolist()}
    ours, bound = [], []
    for _ in range(runs):
        wanted = [chains[random_.randrange(len(chains))].tolist() for _ in range(ASKED)]
        digests = [[key ^ 1 for key in keys] for keys in wanted]
        began = time.perf_counter()
        for keys, theirs in zip(wanted, digests):
            books.lookup(keys, theirs, float(len(chains)))
        ours.append(ASKED * CHAIN / (time.perf_counter() - began))
        wanted = [chains[random_.randrange(len(chains))].tolist() for _ in range(ASKED)]
        began = time.perf_counter()
        for keys in wanted:
            [plain[key] for key in keys]
        bound.append(ASKED * CHAIN / (time.perf_counter() - began))
    assert books.counters["hits_dram"] == runs * ASKED * CHAIN, "a lookup missed"
    return statistics.median(ours), statistics.median(bound)


def publish(books: Directory, owner: str, keys: array[int], now: float) -> None:
    """Put one chain of blocks from start to end."""
    wanted = [Wanted(LAYOUT.nbytes, key, key ^ 1) for key in keys]
    made = books.allocate_many(owner, wanted, now=now)
    sums = [[key + layer & 2**64 - 1 for layer in range(LAYOUT.layers)] for key in keys]
    books.put_end_many([obj.object_id for obj in made], sums, now)
    books.drain_events()

"""The store: the HDF5 tier beside plain files, the names of blocks, the pool's books, and objects of many
clients beside Mooncake Store's (in `store_objects`).

Run by `bench.command`.

The tier writes blocks durably, reads them back verified, and finds them again after a start. Blocks are 1
MiB, files 64 MiB. The plain files hold the same bytes, with neither HDF5, index nor checksums when they are
written; each is a new one, and synced once when it is full, as each of ours is. Reading is held against
`preadv` of the same bytes of our own files: where a file's pages happen to lie in memory changes either by a
third.

The books give and take ranges of a segment, and look up chains of keys among a million blocks. No bytes of
KV are touched: this is what the conductor pays per request. The limit of a lookup is what any directory in
Python has to do, one dictionary access for each key.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterable
from itertools import repeat
from pathlib import Path

import numpy as np
import psutil
from xxhash import xxh3_64_intdigest

from mooncake_lite.tools.bench import store_objects
from mooncake_lite.tools.bench.result import Other, Row, median_seconds
from store.allocator import Extent, RangeAllocator
from store.directory import Directory
from store.keys import prefix_keys
from store.layout import BlockLayout
from store.objects import Wanted
from store.ssd.segment_file import open_sealed
from store.tier import SEGMENT_NBYTES, HDF5Tier

LAYOUT = BlockLayout(16, 4, 64, 64, 2)
PER_FILE = SEGMENT_NBYTES // LAYOUT.nbytes
RECOVERED = 10_000
SMALL = BlockLayout(4, 1, 16, 16, 2)
"""Of what is only found again: its bytes are not read then."""

BOOKED = BlockLayout(30, 3, 64, 64, 4)
"""Of the blocks in the pool's books."""

CHAIN = 250
"""Blocks of a prompt of 16,000 tokens."""
SEGMENTS = 4
FILL = 0.9
PAIRS = 20_000
ASKED = 200
"""Chains looked up in one run."""


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure in a temporary folder (below `folder`), which is removed.

    Quick: with a tenth of the books' blocks, which are then closer at hand than a million are.
    """
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-", dir=folder) as place:
        rows = tier(Path(place), *((1, 5) if quick else (2, 15)))
    blocks, runs = (100_000, 5) if quick else (1_000_000, 9)
    rows += [
        keys(5 if quick else 15),
        allocating("sizes 4 KiB to 4 MiB", 10, 2**30, runs),
        allocating("one size", 0, PAIRS * 4096, runs),
        *directory(blocks, runs),
    ]
    return rows + store_objects.run(quick)


def tier(folder: Path, files: int, runs: int) -> list[Row]:
    """Measure the SSD tier in a folder."""
    blocks = np.random.default_rng(0).integers(0, 255, (files * PER_FILE, LAYOUT.nbytes), np.uint8)
    return [write(folder, blocks, runs), read(folder, blocks, runs), recover(folder, runs)]


def keys(runs: int) -> Row:
    """Prefix keys of a prompt of 8192 tokens."""
    prompt = [token % 49152 for token in range(8192)]
    (seconds,) = median_seconds(runs, lambda: prefix_keys(prompt, 64, b"salt"))
    return Row("prefix keys of 8192 tokens", "us", seconds * 1e6, None, None, runs)


def fill(tier: HDF5Tier, blocks: Iterable[np.ndarray], sums: Iterable[list[int]]) -> None:
    """Append all blocks under their numbers; seal full files, and the last."""
    for key, (block, checksums) in enumerate(zip(blocks, sums)):
        tier.append(key, key, checksums, block, time.monotonic())
        if tier.seal_at == float("-inf"):  # the open file is full
            tier.seal()
    tier.seal()


def write(folder: Path, blocks: np.ndarray, runs: int) -> Row:
    """Durable at the end, checksums of put_end compared on the way. What was written is deleted between the
    runs, on both sides."""
    sums = [LAYOUT.checksums(block) for block in blocks]
    files = len(blocks) // PER_FILE
    tiers = [HDF5Tier(folder / "tier", 1 << 40, LAYOUT, "00")]

    def write_plain() -> None:
        (folder / "plain").mkdir()
        for number in range(files):
            with (folder / "plain" / str(number)).open("wb", buffering=0) as file:
                for block in blocks[number * PER_FILE : (number + 1) * PER_FILE]:
                    file.write(block)
                os.fsync(file.fileno())

    def delete() -> None:
        tiers.pop().close()
        shutil.rmtree(folder / "tier")
        shutil.rmtree(folder / "plain")
        tiers.append(HDF5Tier(folder / "tier", 1 << 40, LAYOUT, "00"))

    try:
        ours, plain, _ = median_seconds(runs, lambda: fill(tiers[0], blocks, sums), write_plain, delete)
    finally:
        tiers[0].close()
    nbytes = blocks.nbytes / 1e9
    name = f"tier write, {len(blocks)} blocks of 1 MiB, {files} files"
    return Row(name, "GB/s", nbytes / ours, Other("plain files, fsync each", nbytes / plain), None, runs)


def read(folder: Path, blocks: np.ndarray, runs: int) -> Row:
    """Page cache warm, every layer's checksum verified on both sides."""
    sums = [LAYOUT.checksums(block) for block in blocks]
    tier = HDF5Tier(folder / "read", 1 << 40, LAYOUT, "00")
    fill(tier, blocks, sums)
    places = []
    for path in sorted((folder / "read").glob("*.h5")):
        file = open_sealed(path, 0, LAYOUT, b"\0")
        places += [(path, int(offset)) for offset in file.offsets]
    fds = {path: os.open(path, os.O_RDONLY) for path, _ in places}
    out = memoryview(bytearray(LAYOUT.nbytes))
    layers = range(0, LAYOUT.nbytes, LAYOUT.layer_nbytes)

    def read_ours() -> None:
        for key in range(len(blocks)):
            tier.load(key, out)

    def read_plain() -> None:
        for (path, offset), wanted in zip(places, sums):
            os.preadv(fds[path], [out], offset)
            if [xxh3_64_intdigest(out[at : at + LAYOUT.layer_nbytes]) for at in layers] != wanted:
                raise ValueError(f"{path} reads back other bytes")

    try:
        ours, plain = median_seconds(runs, read_ours, read_plain)
    finally:
        tier.close()
        for fd in fds.values():
            os.close(fd)
    nbytes = blocks.nbytes / 1e9
    beside = Other("preadv, then the same checksums", nbytes / plain)
    return Row(f"tier read, {len(blocks)} blocks of 1 MiB, warm", "GB/s", nbytes / ours, beside, None, runs)


def recover(folder: Path, runs: int) -> Row:
    """A start on a folder of 10,000 blocks in files as full as those of 1 MiB blocks: all are verified."""
    tier = HDF5Tier(folder / "found", 1 << 40, SMALL, "00", segment_bytes=PER_FILE * SMALL.nbytes)
    block = np.zeros(SMALL.nbytes, np.uint8)
    sums = SMALL.checksums(block)
    fill(tier, repeat(block, RECOVERED), repeat(sums))
    tier.close()

    def start() -> None:
        again = HDF5Tier(folder / "found", 1 << 40, SMALL, "00")
        assert len(again) == RECOVERED
        again.close()

    (seconds,) = median_seconds(runs, start)
    return Row(f"tier start, {RECOVERED:,} blocks", "ms", seconds * 1e3, None, None, runs)


def allocating(name: str, octaves: int, capacity: int, runs: int) -> Row:
    """Allocate/free pairs at 90 % fill, of sizes from 4 KiB on, log-uniform over so many octaves."""
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
    books = Directory(BOOKED)
    for rank in range(SEGMENTS):
        books.add_segment(rank, (blocks // SEGMENTS + CHAIN) * BOOKED.nbytes, rank % 2)
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
    wanted = [Wanted(BOOKED.nbytes, key, key ^ 1) for key in keys]
    made = books.allocate_many(owner, wanted, now=now)
    sums = [[key + layer & 2**64 - 1 for layer in range(BOOKED.layers)] for key in keys]
    books.put_end_many([obj.object_id for obj in made], sums, now)
    books.drain_events()

"""Lab 3 at work: policies among others on a trace, a pool that writes back, and a tier after a crash.

Run by `mooncake-lite labs run 3`, once with the student's tree and once with the reference:

    python play.py MODEL DATA SIZES

Prints a list of `Played` (mooncake_lite/labs/playing.py) as JSON. It needs no model.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from mooncake_lite.simulator.replay import Workload, replay, workload_of
from mooncake_lite.workloads.traces import read_trace
from store.allocator import RangeAllocator
from store.directory import Directory
from store.errors import PoolFull, SegmentFileError
from store.layout import BlockLayout
from store.policies import policy_factory
from store.ssd.segment_file import open_sealed
from store.ssd.segment_writer import SegmentWriter

POLICIES = ("lru", "leaves-first", "s3fifo", "belady")
LAYOUT = BlockLayout(layers=4, kv_heads=1, block_tokens=16, head_dim=16, itemsize=4)
FILES, BLOCKS = 12, 8
"""Of the tier: files, and blocks in each."""

Numbers = tuple[list[int], int]
"""Numbers that must be equal on both sides, and those that the column `reused` shows."""


def counted(what: str, numbers: Numbers, said: str = "", gain: str = "") -> dict[str, Any]:
    """Return one part of the play."""
    tokens, reused = numbers
    return {
        "what": what, "tokens": tokens, "reused": reused, "seconds": None, "said": said, "kind": "counts",
        "how": "counted", "gain": gain,
    }  # fmt: skip


def replayed(workload: Workload, policy: str, blocks: int) -> Numbers:
    """Replay the trace of the class; the hits are reused."""
    seen = replay(workload, policy_factory(policy, workload.order())(blocks), blocks)
    return [seen.misses, seen.evictions], seen.hits


def curves(workload: Workload, sizes: list[int]) -> dict[str, Any]:
    """Replay the trace with every policy and size. The miss ratios are said."""
    hits = [[replayed(workload, policy, blocks)[1] for blocks in sizes] for policy in POLICIES]
    ratios = [
        f"{policy} {' '.join(f'{1 - found / workload.references:.3f}' for found in row)}"
        for policy, row in zip(POLICIES, hits)
    ]
    lru, leaves, s3fifo, belady = (row[0] for row in hits)
    gain = (
        f"in a pool of {sizes[0]} blocks, leaves-first finds {leaves / lru:.2f} times as many blocks as LRU, "
        f"S3-FIFO {s3fifo / lru:.2f} times as many, and Belady's oracle {belady / lru:.2f} times as many"
    )
    what = f"miss ratios with {', '.join(map(str, sizes))} blocks"
    numbers = [found for row in hits for found in row], sum(map(sum, hits))
    return counted(what, numbers, "; ".join(ratios), gain)


def objects() -> Numbers:
    """Let objects of many sizes come and go; those that need several extents are reused holes."""
    draw = random.Random(3)
    allocator = RangeAllocator(2**20)
    alive: list[tuple[tuple[int, int], ...]] = []
    counts = []
    for _ in range(2000):
        extents = allocator.allocate_extents(draw.randint(1, 2**16))
        if extents is None:
            for offset, _ in alive.pop(draw.randrange(len(alive))):
                allocator.free(offset)
            continue
        alive.append(extents)
        counts.append(len(extents))
    return counts, sum(count > 1 for count in counts)


def written_back(workload: Workload, blocks: int) -> Numbers:
    """Put the prompts of the trace into a pool whose tier is slow; blocks found in either are reused."""
    directory = Directory(LAYOUT)
    directory.add_segment(0, blocks * LAYOUT.nbytes, 0, tier=True)
    waiting: list[int] = []
    found = 0
    for number, (_, ids) in enumerate(workload.requests):
        there = directory.lookup(ids, ids, float(number))
        found += len(there)
        made = []
        try:
            for key in ids[len(there) :]:
                owner = f"request {number}"
                made.append(directory.allocate(owner, LAYOUT.nbytes, now=0.0, key=key, digest=key))
        except PoolFull:
            pass  # the rest of this prompt is not kept
        directory.put_end_many(
            [obj.object_id for obj in made], [[1] * LAYOUT.layers] * len(made), float(number)
        )
        directory.release(f"request {number}", float(number))
        waiting += [obj.key or 0 for taken in directory.take_saves().values() for obj in taken]
        durable, waiting = waiting[:6], waiting[6:]
        directory.durable(0, durable)
    directory.check()
    counters = directory.counters
    return [counters["saves"], counters["saves_skipped"], counters["evictions"], found], found


def crashed() -> Numbers:
    """Write files of a tier, damage most of them as a crash does, and open all; blocks found are reused."""
    draw = random.Random(3)
    opened = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(FILES):
            path = Path(folder) / f"seg-{number:08}.h5"
            writer = SegmentWriter(path, LAYOUT, b"\1")
            for key in range(BLOCKS):
                block = draw.randbytes(LAYOUT.nbytes)
                writer.append(BLOCKS * number + key, key, LAYOUT.checksums(block), memoryview(block))
            writer.seal(number)
            data = bytearray(path.read_bytes())
            if number % 4 == 1:
                del data[draw.randrange(len(data)) :]
            elif number % 4 == 2:
                data[draw.randrange(8192)] ^= 1
            elif number % 4 == 3:
                data[4096:8192] = bytes(4096)
            path.write_bytes(data)
            try:
                opened.append(len(open_sealed(path, number, LAYOUT, b"\1").keys))
            except SegmentFileError:
                opened.append(0)
    return opened, sum(opened)


def main() -> None:
    """Play everything."""
    _, data, sizes = sys.argv[1:]
    pool = json.loads(sizes)["pool_blocks"]
    workload = workload_of(read_trace(Path(data) / "trace.jsonl"))
    seen = [curves(workload, [pool // 2, pool, 2 * pool, 4 * pool])]
    for blocks in (pool // 2, pool, 2 * pool):
        for policy in POLICIES:
            what = f"trace, {blocks} blocks, {policy}"
            seen.append(counted(what, replayed(workload, policy, blocks)))
    seen.append(counted("objects in several extents", objects()))
    seen.append(counted(f"pool of {pool} blocks, slow tier", written_back(workload, pool)))
    seen.append(counted(f"{FILES} files after a crash", crashed()))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()

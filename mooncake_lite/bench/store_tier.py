"""The HDF5 tier beside plain files: blocks written durably, read back verified, found again after a start.

Called by `bench.store`. Blocks are 1 MiB, files 64 MiB. The plain files hold the same bytes, with neither
HDF5, index nor checksums when they are written; each is a new one, and synced once when it is full, as each
of ours is. Reading is held against `preadv` of the same bytes of our own files: where a file's pages happen
to lie in memory changes either by a third.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from mooncake_lite.bench.result import Other, Row, against, median_seconds
from store.layout import BlockLayout
from store.segment_file import open_sealed
from store.tier import SEGMENT_NBYTES, HDF5Tier

LAYOUT = BlockLayout(16, 4, 64, 64, 2)
PER_FILE = SEGMENT_NBYTES // LAYOUT.nbytes
RECOVERED = 10_000
SMALL = BlockLayout(4, 1, 16, 16, 2)
"""Of what is only found again: its bytes are not read then."""


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure in a temporary folder (below `folder`), which is removed."""
    files, runs = (1, 5) if quick else (2, 15)
    blocks = np.random.default_rng(0).integers(0, 255, (files * PER_FILE, LAYOUT.nbytes), np.uint8)
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-", dir=folder) as name:
        return [write(Path(name), blocks, runs), read(Path(name), blocks, runs), recover(Path(name), runs)]


def fill(tier: HDF5Tier, blocks: np.ndarray, sums: list[list[int]]) -> None:
    """Append all blocks (count, nbytes) under their numbers; seal full files, and the last."""
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
        ours, plain, _ = against(runs, lambda: fill(tiers[0], blocks, sums), write_plain, delete)
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
    for key in range(RECOVERED):
        tier.append(key, key, sums, block, 0.0)
        if tier.seal_at == float("-inf"):
            tier.seal()
    tier.close()

    def start() -> None:
        again = HDF5Tier(folder / "found", 1 << 40, SMALL, "00")
        assert len(again) == RECOVERED
        again.close()

    (seconds,) = median_seconds(runs, start)
    return Row(f"tier start, {RECOVERED:,} blocks", "ms", seconds * 1e3, None, None, runs)

"""The store: its HDF5 tier beside plain files, its keys, and objects of many clients beside Mooncake's.

A block is SmolLM2's: 64 tokens of 30 layers, 2.9 MB. The peer writes and reads the same bytes in one plain
file without an index, without checksums and without HDF5.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from mooncake_lite.bench import store_objects
from mooncake_lite.bench.result import Other, Row, against, median_seconds
from store.keys import block_digest, prefix_keys
from store.layout import BlockLayout
from store.tier import HDF5Tier

LAYOUT = BlockLayout(30, 3, 64, 64, 4)


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure in a temporary folder (below `folder`), which is removed."""
    count, runs = (16, 3) if quick else (64, 9)
    blocks = np.random.default_rng(0).integers(0, 255, (count, LAYOUT.nbytes), np.uint8)
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-", dir=folder) as name:
        rows = [*tier(Path(name), blocks, runs), keys(runs)]
    return rows + store_objects.run(quick)


def tier(folder: Path, blocks: np.ndarray, runs: int) -> list[Row]:
    """Writing (durable at the end) and reading (page cache warm, every layer's checksum verified)."""
    tokens = [[number] * 64 for number in range(len(blocks))]
    names = [prefix_keys(some, 64, b"")[0] for some in tokens]
    digests = [block_digest(some) for some in tokens]
    sums = [LAYOUT.checksums(block) for block in blocks]
    plain, number = folder / "plain", iter(range(10**6))
    tiers: list[HDF5Tier] = []

    def write_ours() -> None:
        tiers.append(HDF5Tier(folder / f"tier-{next(number)}", 2 * blocks.nbytes, LAYOUT, "00"))
        for name, digest, checksums, block in zip(names, digests, sums, blocks):
            tiers[-1].append(name, digest, checksums, block, time.monotonic())
            if tiers[-1].seal_at == float("-inf"):  # the open file is full
                tiers[-1].seal()
        tiers[-1].seal()

    def write_plain() -> None:
        with plain.open("wb") as file:
            for block in blocks:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    out = np.empty(LAYOUT.nbytes, np.uint8)
    view = out.data

    def read_ours() -> None:
        for name in names:
            tiers[-1].load(name, view)

    def read_plain() -> None:
        with plain.open("rb", buffering=0) as file:
            for _ in names:
                file.readinto(view)

    try:
        write, _, plain_write = against(runs, write_ours, write_plain, write_plain)
        read, _, plain_read = against(runs, read_ours, read_plain, read_plain)
    finally:
        for one in tiers:
            one.close()
    nbytes, name = blocks.nbytes / 1e9, f"{len(blocks)} blocks of {LAYOUT.nbytes / 1e6:.1f} MB"
    written, read_back = (
        Other("plain file, one fsync", nbytes / plain_write),
        Other("plain file", nbytes / plain_read),
    )
    return [
        Row(f"tier write, {name}", "GB/s", nbytes / write, None, written, runs),
        Row(f"tier read, {name}, warm", "GB/s", nbytes / read, None, read_back, runs),
    ]


def keys(runs: int) -> Row:
    """Prefix keys of a prompt of 8192 tokens."""
    prompt = [token % 49152 for token in range(8192)]
    (seconds,) = median_seconds(runs, lambda: prefix_keys(prompt, 64, b"salt"))
    return Row("prefix keys of 8192 tokens", "us", seconds * 1e6, None, None, runs)

"""Measures how fast KV moves on this machine: between two ranks, into pages, and from the SSD tier.

Called by `mooncake-lite profile`. It uses the transport, the engine and the tier as a cluster does. Explained
in docs/explain/costs.md.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mooncake_lite.config.serve import PAGE_TOKENS
from mooncake_lite.engine.engine import Engine
from mooncake_lite.engine.local import BLOCK_TOKENS
from mooncake_lite.errors import ClusterError, LaunchError
from mooncake_lite.profiles.file import MovesSection
from mooncake_lite.tools.bench.result import timed
from mooncake_lite.tools.doctor import links
from store.layout import BlockLayout
from store.tier import HDF5Tier

RUNS = 5
PAGES_PER_BLOCK = BLOCK_TOKENS // PAGE_TOKENS
SSD_BYTES = 32 * 2**20


def measure_moves(engine: Engine, folder: Path, tell: Callable[[str], None]) -> MovesSection:
    """Measure everything but what lies between nodes.

    folder   where a tier is written for a moment, and read
    tell     is told what could not be measured, and why
    """
    near_latency_s = near_bytes_per_s = None
    try:
        (pair, *_) = links.measure(2, "", (), "ft").pairs
        near_bytes_per_s, near_latency_s = 1e9 * pair.gb_per_s, 1e-6 * pair.latency_us
    except (ClusterError, LaunchError) as error:
        tell(f"copies between ranks are not measured: {error}")
    return MovesSection(
        near_bytes_per_s=near_bytes_per_s,
        near_latency_s=near_latency_s,
        dram_bytes_per_s=load_rate(engine),
        ssd_bytes_per_s=ssd_rate(engine, folder),
    )


def load_rate(engine: Engine) -> float:
    """Return bytes per second from memory of the node into pages: a read into staging, then into pages."""
    count = min(8, engine.num_pages // PAGES_PER_BLOCK)
    source = np.ones((count, *engine.block_shape), engine.block_dtype)
    staging, pages = np.ones_like(source), range(count * PAGES_PER_BLOCK)

    def load() -> None:
        np.copyto(staging, source)
        engine.load_blocks(pages, staging)

    seconds = timed(load)
    return source.nbytes / min(seconds() for _ in range(RUNS))


def ssd_rate(engine: Engine, folder: Path) -> float:
    """Return bytes per second from a sealed file, each block verified. The page cache is emptied before."""
    layers, _, kv_heads, block_tokens, head_dim = engine.block_shape
    itemsize = np.dtype(engine.block_dtype).itemsize
    layout = BlockLayout(layers, kv_heads, block_tokens, head_dim, itemsize)
    count = max(1, SSD_BYTES // layout.nbytes)
    block = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
    sums, out = layout.checksums(block), np.zeros(layout.nbytes, np.uint8)
    with tempfile.TemporaryDirectory(prefix=".mooncake-lite-profile-", dir=folder) as name:
        tier = HDF5Tier(Path(name), 1 << 40, layout, "00")
        try:
            for key in range(count):
                tier.append(key, key, sums, block, time.monotonic())
            tier.seal()
            taken = []
            for _ in range(RUNS):
                _empty_page_cache(Path(name))
                began = time.perf_counter()
                for key in range(count):
                    tier.load(key, out)
                taken.append(time.perf_counter() - began)
        finally:
            tier.close()
    return count * layout.nbytes / min(taken)


def _empty_page_cache(folder: Path) -> None:
    """Have the kernel drop what it keeps of these files. A file system in memory has nothing to drop."""
    for path in folder.glob("*.h5"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

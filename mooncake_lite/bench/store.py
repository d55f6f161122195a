"""The store: the HDF5 tier beside plain files, the names of blocks, the pool's books, and objects of
many clients beside Mooncake Store's.

Each in a module of its own: `bench.store_tier`, here, `bench.store_directory`, `bench.store_objects`.
"""

from __future__ import annotations

from pathlib import Path

from mooncake_lite.bench import store_directory, store_objects, store_tier
from mooncake_lite.bench.result import Row, median_seconds
from store.keys import prefix_keys


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure in a temporary folder (below `folder`), which is removed."""
    rows = [*store_tier.run(quick, folder), keys(5 if quick else 15), *store_directory.run(quick)]
    return rows + store_objects.run(quick)


def keys(runs: int) -> Row:
    """Prefix keys of a prompt of 8192 tokens."""
    prompt = [token % 49152 for token in range(8192)]
    (seconds,) = median_seconds(runs, lambda: prefix_keys(prompt, 64, b"salt"))
    return Row("prefix keys of 8192 tokens", "us", seconds * 1e6, None, None, runs)

"""Moving KV between pages and pool blocks on the CPU, beside a copy of contiguous memory with all threads.

Run by `bench.kernels`. Bytes are those of the uncompressed KV, whatever a codec makes of them.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels_numba import gather_blocks, scatter_blocks
from kernels_numba.codecs import CODECS
from mooncake_lite.bench.result import Action, Row, compare, gigabytes_per_second

LAYERS, KV_HEADS, PAGE, BLOCK, DIM = 30, 3, 16, 64, 64
"""SmolLM2's KV: a block has 2.9 MB."""


def run(quick: bool) -> list[Row]:
    """Measure; in some seconds when quick."""
    runs = 7 if quick else 21
    return movers(24, runs, "none") + movers(24, runs, "int8")


def movers(blocks: int, runs: int, codec: str) -> list[Row]:
    """`blocks` blocks out of the pages of all layers, and back. The peer does it with NumPy's indexing."""
    pages = blocks * BLOCK // PAGE * 2
    rng = np.random.default_rng(3)
    caches = rng.standard_normal((LAYERS, 2, pages, KV_HEADS, PAGE, DIM), np.float32)
    ids = rng.permutation(pages)[: pages // 2].astype(np.int32).reshape(blocks, -1)
    shape = (LAYERS, 2, KV_HEADS, BLOCK, DIM)
    plain = np.empty((blocks, *shape), np.float32)
    how = None if codec == "none" else CODECS[codec]
    ours = plain
    if how is not None:
        ours = np.zeros((blocks, LAYERS, 2, KV_HEADS, how.unit_nbytes(BLOCK, DIM)), np.uint8)
    source, target = torch.from_numpy(plain.copy()), torch.from_numpy(plain.copy())

    def index() -> None:
        for number in range(blocks):
            pieces = caches[:, :, ids[number]].transpose(0, 1, 3, 2, 4, 5)
            plain[number] = pieces.reshape(shape)

    def index_back() -> None:
        for number in range(blocks):
            pieces = plain[number].reshape(LAYERS, 2, KV_HEADS, -1, PAGE, DIM)
            caches[:, :, ids[number]] = pieces.transpose(0, 1, 3, 2, 4, 5)

    copy = Action("copy of contiguous memory, all threads", lambda: target.copy_(source))
    figure = gigabytes_per_second(plain.nbytes)
    name = f"{plain.nbytes / 1e6:.0f} MB, codec {codec}"
    gather = compare(
        f"gather {name}", "GB/s", figure, runs,
        lambda: gather_blocks(caches, ids, ours, codec=how), [Action("NumPy indexing", index)], copy,
    )  # fmt: skip
    scatter = compare(
        f"scatter {name}", "GB/s", figure, runs,
        lambda: scatter_blocks(ours, caches, ids, codec=how), [Action("NumPy indexing", index_back)], copy,
    )  # fmt: skip
    return gather + scatter

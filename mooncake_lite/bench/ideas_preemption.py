"""Preemption: more sequences than pages, by recompute and by swap, beside a rank with enough pages.

Run by `bench.ideas`. One real compute rank, and a store rank with the pool. A sequence that is recomputed
loads the blocks that the pool has, and computes the rest; without prefix caching the pool has none.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from mooncake_lite.bench.engine_cluster import stream_times
from mooncake_lite.bench.engine_sides import random_prompts
from mooncake_lite.bench.ideas_cluster import started
from mooncake_lite.bench.result import Other, Row
from mooncake_lite.config import PAGE_TOKENS, ServeConfig
from mooncake_lite.model.config import load_config
from mooncake_lite.sizes import page_nbytes

RUNS = 2
"""Of each cluster, with other prompts each time: the pool knows the last ones."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences that begin at once, tokens of each prompt and of each answer, and pages for all of them.

    All prompts fit into the pages, so that all sequences begin; not all answers do.
    """

    sequences: int
    tokens: int
    new: int
    pages: int

    @property
    def enough(self) -> int:
        """Return the pages with which no sequence is preempted."""
        return self.sequences * (-(-(self.tokens + self.new) // PAGE_TOKENS) + 1)


def run(folder: Path, vocab: int, threads: int, shape: Shape) -> list[Row]:
    """Measure the time of all answers. Raises ClusterError."""

    def total_s(pages: int, *flags: str) -> float:
        with started([*cluster_flags(folder, threads, shape, pages), *flags]) as port:
            return statistics.median(_seconds(port, vocab, shape, seed) for seed in range(RUNS))

    enough = Other("enough pages", total_s(shape.enough))
    what = f"{shape.sequences} x {shape.tokens} + {shape.new} tokens, {shape.pages} of {shape.enough} pages"
    rows = []
    for caching, flags in (("", ()), (", no prefix caching", ("--no-enable-prefix-caching",))):
        swap = total_s(shape.pages, "--preemption", "swap", *flags)
        recompute = Other("recompute", total_s(shape.pages, *flags))
        rows.append(Row(f"preemption, swap{caching}: {what}", "s", swap, recompute, enough, RUNS))
    return rows


def _seconds(port: int, vocab: int, shape: Shape, seed: int) -> float:
    """Ask for all answers at once; return the seconds until the last one is complete."""
    prompts = random_prompts(shape.sequences, shape.tokens, vocab, seed)
    began = time.perf_counter()
    return max(each[-1] for each in stream_times(port, prompts, shape.new)) - began


def cluster_flags(folder: Path, threads: int, shape: Shape, pages: int) -> list[str]:
    """Return the flags of a cluster with so many pages."""
    nbytes = page_nbytes(ServeConfig(), load_config(folder))
    length = shape.tokens + shape.new
    return [
        str(folder), *("--mode", "colocated", "--compute", "1", "--store", "1"), "--threads", str(threads),
        *("--kv-cache-bytes", str(pages * nbytes), "--max-model-len", str(length)),
        *("--max-num-seqs", str(shape.sequences)),
    ]  # fmt: skip

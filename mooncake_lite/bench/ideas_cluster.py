"""Clusters for the ideas that need one, and requests whose times are known.

Used by `ideas_preemption`, `ideas_loading`, `ideas_modes` and `ideas_trace`.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from mooncake_lite.bench.engine_cluster import START_LIMIT_S, stream_times
from mooncake_lite.bench.engine_sides import Prompts
from mooncake_lite.demo.cluster import Cluster

EMULATED = ["--engine", "emulated"]
"""Ranks that sleep for as long as the shipped profile says: few cores do not decide between clusters."""


class Figures(NamedTuple):
    """What some requests came to, in ms: means, and the median of each answer's longest gap."""

    ttft_ms: float
    tpot_ms: float
    gap_ms: float


@contextlib.contextmanager
def started(flags: list[str]) -> Iterator[int]:
    """Start a cluster that has answered once; give its port. Raises ClusterError."""
    temporary = tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-")
    with temporary as place, Cluster(flags, Path(place) / "log") as cluster:
        cluster.wait_ready(START_LIMIT_S)
        stream_times(cluster.port, [[1] * 32], 2)
        yield cluster.port


def at_intervals(port: int, prompts: Prompts, new: int, every_s: float) -> Figures:
    """Ask for an answer of `new` tokens every `every_s` seconds. Raises ClusterError."""
    began = time.perf_counter()

    def ask(number: int) -> tuple[float, list[float]]:
        time.sleep(max(0.0, began + number * every_s - time.perf_counter()))
        asked = time.perf_counter()
        return asked, stream_times(port, [prompts[number]], new)[0]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return figures(list(pool.map(ask, range(len(prompts)))), new)


def figures(found: list[tuple[float, list[float]]], new: int) -> Figures:
    """Return the figures of answers of `new` tokens.

    found   of each: when it was asked for, and when its pieces came. A piece is a token, or a few where a
            character needs several; so a gap can be that of two tokens, and the median of gaps is taken
    """
    return Figures(
        1e3 * statistics.fmean(times[0] - asked for asked, times in found),
        1e3 * statistics.fmean((times[-1] - times[0]) / (new - 1) for _, times in found),
        1e3 * statistics.median(max(b - a for a, b in pairwise(times)) for _, times in found),
    )

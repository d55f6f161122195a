"""A cluster of sleeping ranks for `goodput`, and the memory of its conductor and its gateway.

The ranks sleep for the times of the shipped profile, made longer. So a few requests per second are a full
load for them, and a small machine has cores left for ten times as many.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from mooncake_lite.bench.engine_cluster import START_LIMIT_S
from mooncake_lite.demo.cluster import Cluster
from mooncake_lite.errors import ClusterError, ConfigError
from mooncake_lite.profiles.file import Profile, parse_profile, shipped_profile, write_profile

SLOWER = 3.0
"""Times of the shipped profile are multiplied by it."""

SAMPLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranks of each role, and the limits on latency of every request.

    headroom   admission gets the limits times this: it admits up to what it is told, and predictions are not
               exact, so with the limits themselves many requests would come just too late. A rank that is
               told 48 of 60 ms still decodes 92 % as fast: most of a step is per sequence.
    """

    prefill: int = 6
    decode: int = 2
    slo_ttft_ms: float = 3000.0
    slo_tpot_ms: float = 60.0
    headroom: float = 0.8


def slow_profile(folder: Path) -> Profile:
    """Return the shipped profile of a model, SLOWER times as slow. Raises ConfigError without one."""
    raw = shipped_profile(folder)
    if raw is None:
        raise ConfigError(f"no profile of {folder.name} comes with this program; bench the default model")
    profile = parse_profile(raw, folder.name)
    compute = msgspec.structs.replace(profile.compute, time_scale=profile.compute.time_scale * SLOWER)
    return profile.with_section("compute", compute)


@contextlib.contextmanager
def sleepers(folder: Path, profile: Profile, shape: Shape, admission: str) -> Iterator[Cluster]:
    """Start a cluster with a form of admission. Raises ClusterError."""
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-") as place:
        file, told = Path(place) / "profile.json", shape.headroom
        write_profile(file, profile)
        flags = [
            *(str(folder), "--engine", "emulated", "--profile", str(file), "--admission", admission),
            *("--prefill", str(shape.prefill), "--decode", str(shape.decode), "--store", "1"),
            *("--slo-ttft-ms", f"{told * shape.slo_ttft_ms:g}"),
            *("--slo-tpot-ms", f"{told * shape.slo_tpot_ms:g}"),
            *("--pool-bytes", "1GiB", "--staging-bytes", "32MiB", "--max-num-seqs", "32"),
        ]
        with Cluster(flags, Path(place) / "log") as cluster:
            cluster.wait_ready(START_LIMIT_S)
            yield cluster


@contextlib.asynccontextmanager
async def memory_of(pid: int) -> AsyncIterator[dict[str, list[int]]]:
    """Give the resident bytes of the conductor and of the gateway, a sample each SAMPLE_S until the end.

    pid   of `serve`
    """
    processes = control_processes(pid)
    samples: dict[str, list[int]] = {name: [] for name in processes}

    async def watch() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            for name, process in processes.items():
                with contextlib.suppress(psutil.Error):
                    samples[name].append(process.memory_info().rss)

    task = asyncio.create_task(watch())
    try:
        yield samples
    finally:
        task.cancel()


def control_processes(pid: int) -> dict[str, psutil.Process]:
    """Find the conductor and the gateway of a cluster. pid: of `serve`. Raises ClusterError."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "mooncake_lite.gateway" in process.cmdline():
                found["gateway"] = process
            elif process.environ().get("OMPI_COMM_WORLD_RANK") == "0":
                found["conductor"] = process
    if len(found) < 2:
        raise ClusterError("the conductor or the gateway of the cluster is not found")
    return found


def thirds(samples: Sequence[int]) -> tuple[float, float]:
    """Return the mean of the second third of some samples, and of the last one. There must be three."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    return sum(middle) / len(middle), sum(last) / len(last)

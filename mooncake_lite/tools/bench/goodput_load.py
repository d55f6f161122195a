"""A cluster of sleeping ranks for `goodput`, the load that it is offered, and the memory of its conductor.

The ranks sleep for the times of the shipped profile, made longer. So a few requests per second are a full
load for them, and a small machine has cores left for ten times as many. The load is made from a seed: every
form of admission gets the same requests at the same times.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.profiles.file import Profile
from mooncake_lite.tools.bench.cluster import Ask, Reply, started
from mooncake_lite.tools.streams import CHILDREN, process_of

SLOWER = 3.0
"""Times of the shipped profile are multiplied by it."""

SAMPLE_S = 0.5

PROMPT_TOKENS, NEW_TOKENS = (128, 384), (32, 96)
"""Least and most tokens; each number between is as likely."""


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


def sleepers(
    folder: Path, profile: Profile, shape: Shape, admission: str
) -> contextlib.AbstractContextManager[Cluster]:
    """Start a cluster with a form of admission. Raises ClusterError."""
    told = shape.headroom
    flags = [
        *(str(folder), "--engine", "emulated", "--admission", admission),
        *("--prefill", str(shape.prefill), "--decode", str(shape.decode), "--store", "1"),
        *("--slo-ttft-ms", f"{told * shape.slo_ttft_ms:g}"),
        *("--slo-tpot-ms", f"{told * shape.slo_tpot_ms:g}"),
        *("--pool-bytes", "1GiB", "--staging-bytes", "32MiB", "--max-num-seqs", "32"),
    ]
    return started(flags, profile)


@contextlib.asynccontextmanager
async def memory_of(pid: int) -> AsyncIterator[dict[str, list[int]]]:
    """Give the resident bytes of the conductor and of the gateway, a sample each SAMPLE_S until the end.

    pid   of `serve`

    Raises ClusterError.
    """
    processes = {name: process_of(pid, name) for name in CHILDREN}
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


def thirds(samples: Sequence[int]) -> tuple[float, float]:
    """Return the mean of the second third of some samples, and of the last one. There must be three."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    return sum(middle) / len(middle), sum(last) / len(last)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive as a Poisson process.

    rate       requests per second
    warm_s     seconds before the window: the books fill, and no request of that time counts
    window_s   seconds of the window
    """

    rate: float
    warm_s: float
    window_s: float

    def asks(self, vocab_size: int, seed: int) -> list[Ask]:
        """Make the requests. No two share a prefix."""
        chosen, at_s = random.Random(f"load {self.rate:g} {seed}"), 0.0
        ids, asks = range(vocab_size // 8, vocab_size), []
        while (at_s := at_s + chosen.expovariate(self.rate)) < self.warm_s + self.window_s:
            prompt = chosen.choices(ids, k=chosen.randint(*PROMPT_TOKENS))
            asks.append(Ask(at_s, prompt, chosen.randint(*NEW_TOKENS)))
        return asks


class Served(NamedTuple):
    """What became of the requests of a window.

    offered     requests; refused: of these, with 429
    good        served within both limits
    window_s    seconds
    refusal_s   median seconds until a refusal; None without any
    """

    offered: int
    refused: int
    good: int
    window_s: float
    refusal_s: float | None

    @property
    def goodput(self) -> float:
        """Return requests per second that were served within both limits."""
        return self.good / self.window_s

    @property
    def good_share(self) -> float:
        """Return the share of the offered requests that were served within both limits."""
        return self.good / max(1, self.offered)


def served(replies: Sequence[Reply], load: Load, slo_ttft_s: float, slo_tpot_s: float) -> Served:
    """Count the requests that were sent in the window."""
    inside = [one for one in replies if one.ask.at_s >= load.warm_s]
    good = [
        one for one in inside if one.status == 200 and one.ttft_s <= slo_ttft_s and one.tpot_s <= slo_tpot_s
    ]
    refusals_s = [one.ttft_s for one in inside if one.status == 429]
    usual_s = statistics.median(refusals_s) if refusals_s else None
    return Served(len(inside), len(refusals_s), len(good), load.window_s, usual_s)

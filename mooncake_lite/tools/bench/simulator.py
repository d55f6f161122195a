"""The simulator beside live runs: the same requests on ranks that serve, and on simulated ones.

Run by `bench.command`. Explained in docs/explain/simulator.md.

    trace ---> live cluster ----------------------------------> latencies, tokens reused
      `------> simulator, with its profile and overheads -----> the same, and intervals

Most runs have sleeping ranks: 4 prefill, 4 decode, 2 stores. The last ones have the default model. Both are
calibrated on runs that do not count. The requests are those of a trace where MOONCAKE_LITE_TRACES names the
folder of conversation_trace.jsonl, and conversations that we make elsewhere.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from msgspec.structs import replace

from mooncake_lite.config.progress import counted
from mooncake_lite.profiles.file import named_profile
from mooncake_lite.simulator.intervals import FIGURES, intervals
from mooncake_lite.tools.bench.cluster import model_folder
from mooncake_lite.tools.bench.predictions import measure_profile
from mooncake_lite.tools.bench.result import Other, Row
from mooncake_lite.tools.bench.simulator_ranks import (
    CONTEXT_TOKENS,
    THREADS,
    Ranks,
    Result,
    few_layers,
    with_overheads_of,
    with_times_of,
)
from mooncake_lite.tools.profile.overheads import overheads_of, sleeping_profile
from mooncake_lite.tools.workload_make import sessions_of
from mooncake_lite.workloads.rescale import divided, spread
from mooncake_lite.workloads.traces import Trace, read_trace
from store.allocator import padded_size

DIVIDE, DIVIDE_REAL = 16, 32
"""Lengths of the trace are divided by it, for sleeping ranks and for the default model."""

USUAL, OVERLOADED = 0.7, 1.2
"""Load: share of the time of the prefill ranks that prompts take. Above 1 their queues grow to the end."""

HELD_OUT = (0.4, 0.9)
"""Loads of the first and of the last run that intervals are tried on."""

Goals = Mapping[str, tuple[str, str, float]]
"""Name -> where it stands in a result, and the error in % that is aimed at."""

GOALS: Goals = {
    "mean TTFT": ("ttft_s", "mean", 5.0),
    "P99 TTFT": ("ttft_s", "p99", 10.0),
    "mean TPOT": ("tpot_s", "mean", 2.0),
    "mean E2E": ("e2e_s", "mean", 3.0),
}
HARD_GOALS: Goals = {"mean TTFT": ("ttft_s", "mean", 10.0)}
"""Under overload, and with a pool that holds a third of the blocks."""

REAL_GOALS: Goals = {
    "mean TTFT": ("ttft_s", "mean", 10.0),
    "P99 TTFT": ("ttft_s", "p99", 20.0),
    "mean TPOT": ("tpot_s", "mean", 5.0),
}
PAUSE_GOAL = 20.0
COVERED = ("ttft_s", "tpot_s", "e2e_s")
LEAST_COVERED = 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How much is played: requests of a run, live runs of the usual load (and of the default model) and of
    each hard case, runs that intervals are tried on, simulated runs of each case, and requests of the default
    model in two halves."""

    requests: int = 500
    repeats: int = 5
    hard: int = 3
    held_out: int = 20
    held_out_requests: int = 100
    simulated: int = 8
    real: int = 200

    @property
    def all_requests(self) -> int:
        """Return how many requests are sent to live clusters."""
        runs = 1 + self.repeats + 2 * self.hard
        held_out = self.held_out * self.held_out_requests
        real = (2 * self.repeats + 1) * self.real // 2
        return runs * self.requests + held_out + real


QUICK = Plan(requests=40, repeats=1, hard=1, held_out=2, held_out_requests=20, simulated=4, real=0)


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure. Raises ClusterError, ModelError, TraceError."""
    model, plan = model_folder(folder), QUICK if quick else Plan()
    with (
        tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-") as place,
        counted("requests", plan.all_requests) as told,
    ):
        rows = Bench(few_layers(model, Path(place)), plan, told).rows()
        return rows + (real_rows(real_ranks(model, Path(place)), plan, told) if plan.real else [])


def conversation(requests: int, divide: int) -> Trace:
    """Return the first requests of the public trace, or as many of made conversations."""
    if place := os.environ.get("MOONCAKE_LITE_TRACES"):
        trace = read_trace(Path(place) / "conversation_trace.jsonl").first(requests)
    else:
        trace = sessions_of(requests, 3.4, seed=1)
    return spread(divided(trace, divide), seed=1)


def slice_of(whole: Trace, begin: int, count: int) -> Trace:
    """Return some requests of a trace, from second 0 on."""
    part = whole.requests[begin : begin + count]
    moved = [replace(one, timestamp=one.timestamp - part[0].timestamp) for one in part]
    return dataclasses.replace(whole, requests=moved)


class Bench:
    """Sleeping ranks, live and simulated."""

    def __init__(self, folder: Path, plan: Plan, told: Callable[[], None]) -> None:
        self.plan, self.told, self._runs = plan, told, 0
        nodes = {"prefill": 4, "decode": 4, "store": 2}
        self.ranks = Ranks(folder, sleeping_profile(folder), nodes, True, 512 // DIVIDE, 512, 64)

    def rows(self) -> list[Row]:
        """Play everything, live and simulated."""
        plan, ranks = self.plan, self.ranks
        played = plan.requests + plan.held_out * plan.held_out_requests
        whole = conversation(played + plan.requests, DIVIDE)
        first, slices = whole.first(plan.requests), self._slices(whole)
        usual, overloaded = ranks.at(first, USUAL), ranks.at(first, OVERLOADED)
        known = ranks.at(slice_of(whole, played, plan.requests), USUAL)
        with ranks.serve() as cluster:
            ranks = ranks.with_overheads(overheads_of(cluster.port, ranks.vocab_size))
            ranks = with_overheads_of(ranks, known, self._live(cluster.port, known))
            lives = [self._live(cluster.port, usual) for _ in range(plan.repeats)]
            over = [self._live(cluster.port, overloaded) for _ in range(plan.hard)]
            held_out = [self._live(cluster.port, one) for one in slices]
        pauses = []
        for _ in range(plan.hard):
            with ranks.serve() as cluster:
                pauses.append(ranks.pause(cluster))
        small = dataclasses.replace(ranks, pool_bytes=self._a_third(first))
        with small.serve() as cluster:
            thrashed = [self._live(cluster.port, usual) for _ in range(plan.hard)]
        rows = compared("usual load", lives, self._simulate(ranks, usual), GOALS)
        rows += compared("1.2 times the capacity", over, self._simulate(ranks, overloaded), HARD_GOALS)
        rows += compared("a third of the blocks fit", thrashed, self._simulate(small, usual), HARD_GOALS)
        rows += pause_rows(pauses, [ranks.simulated_pause(seed) for seed in range(plan.simulated)])
        return rows + self._covered(ranks, slices, held_out)

    def _simulate(self, ranks: Ranks, trace: Trace) -> list[Result]:
        return [ranks.simulate(trace, seed) for seed in range(self.plan.simulated)]

    def _live(self, port: int, trace: Trace) -> Result:
        self._runs += 1
        return self.ranks.live(port, trace, self._runs, self.told)

    def _slices(self, whole: Trace) -> list[Trace]:
        """Return the runs that intervals are tried on, from the rest of the trace."""
        plan, (least, most), found = self.plan, HELD_OUT, list[Trace]()
        for number in range(plan.held_out):
            part = slice_of(whole, plan.requests + number * plan.held_out_requests, plan.held_out_requests)
            found.append(self.ranks.at(part, least + (most - least) * number / plan.held_out))
        return found

    def _a_third(self, trace: Trace) -> int:
        """Return the bytes of a store of which all hold a third of the blocks of a trace, or one request."""
        blocks = len({number for request in trace.requests for number in request.hash_ids})
        nbytes = padded_size(self.ranks.simulated().layout.nbytes)
        stores = self.ranks.nodes["store"]
        longest = CONTEXT_TOKENS // self.ranks.block_tokens + stores
        return max(blocks // 3, longest) // stores * nbytes

    def _covered(self, ranks: Ranks, slices: Sequence[Trace], lives: Sequence[Result]) -> list[Row]:
        """Return for how many runs the live mean lies in the interval of the simulated ones."""
        within = dict.fromkeys(COVERED, 0)
        for trace, live in zip(slices, lives, strict=True):
            seeds = range(self.plan.simulated)
            found = intervals([ranks.simulate(trace, seed, errs=True) for seed in seeds])
            for name in COVERED:
                low, high = found[name]
                within[name] += low <= (FIGURES[name](live) or 0.0) <= high
        count = len(slices)
        goal = Other("the goal", LEAST_COVERED * count)
        return [
            Row(f"live mean {name[:-2].upper()} in its 90 % interval", f"of {count}", hits, None, goal, count)
            for name, hits in within.items()
        ]


def real_ranks(model: Path, place: Path) -> Ranks:
    """Return ranks that compute, with a profile of this machine."""
    measure_profile(model, place / "real.json", *THREADS)
    profile = named_profile(str(place / "real.json"))
    return Ranks(model, profile, {"prefill": 1, "decode": 1, "store": 1}, False, 512 // DIVIDE_REAL, 256, 16)


def real_rows(ranks: Ranks, plan: Plan, told: Callable[[], None]) -> list[Row]:
    """Play the first half of some requests, calibrate the profile on it, and predict the second half.

    A first run tells how fast the ranks are beside each other, and so which speed of the requests is the
    usual load. Then the halves take turns: the speed of a machine drifts from minute to minute.
    """
    whole, half = conversation(plan.real, DIVIDE_REAL), plan.real // 2
    halves = [slice_of(whole, begin, half) for begin in (0, half)]
    with ranks.serve() as cluster:
        first = ranks.at(halves[0], USUAL)
        ranks = with_times_of(ranks, first, [ranks.live(cluster.port, first, 0, told)])
        first, second = (ranks.at(part, USUAL) for part in halves)
        turns = enumerate([first, second] * plan.repeats, 1)
        lives = [ranks.live(cluster.port, part, number, told) for number, part in turns]
    ranks = with_times_of(ranks, first, lives[::2])
    simulated = [ranks.simulate(second, seed) for seed in range(plan.simulated)]
    return compared("default model, held out", lives[1::2], simulated, REAL_GOALS)


def pause_rows(lives: Sequence[float], simulated: Sequence[float]) -> list[Row]:
    """Return the rows about a decode rank that dies."""
    name, count, ours, live = "pause after a killed decode rank", len(lives), fmean(simulated), fmean(lives)
    widest = Other("spread of the live runs", 100 * max(abs(one / live - 1) for one in lives))
    error = 100 * abs(ours / live - 1)
    return [
        Row(name, "s", ours, Other("live", live), None, count),
        Row(f"{name}, error", "% off", error, widest, Other("the goal", PAUSE_GOAL), count),
    ]


def compared(case: str, lives: Sequence[Result], simulated: Sequence[Result], goals: Goals) -> list[Row]:
    """Return two rows for each figure: the means of both sides, and the error beside the goal."""
    rows, count = list[Row](), len(lives)
    for name, (key, statistic, goal) in goals.items():
        found = [live[key][statistic] for live in lives]
        ours, live = fmean(one[key][statistic] for one in simulated), fmean(found)
        widest = 100 * max(abs(one / live - 1) for one in found)
        beside = Other("spread of the live runs", widest) if count > 1 else None
        error, aim = 100 * abs(ours / live - 1), Other("the goal", goal)
        rows.append(Row(f"{case}: {name}", "s", ours, Other("live", live), None, count))
        rows.append(Row(f"{case}: {name}, error", "% off", error, beside, aim, count))
    ours, live = (100 * fmean(one["hit_rate"]["all"] for one in side) for side in (simulated, lives))
    rows.append(Row(f"{case}: tokens reused", "%", ours, Other("live", live), None, count))
    return rows

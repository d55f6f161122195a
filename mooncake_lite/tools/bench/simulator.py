"""The simulator beside live runs: the same requests on sleeping ranks that serve, and on simulated ones.

Run by `bench.command`. Explained in docs/explain/simulator.md.

    trace ---> live cluster of 4 prefill, 4 decode and 2 store ranks ---> latencies, tokens reused
      `------> simulator, with the ranks' profile and overheads --------> the same, and intervals

The requests are those of a trace where MOONCAKE_LITE_TRACES names the folder of conversation_trace.jsonl, and
conversations that we make elsewhere.
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
from mooncake_lite.profiles.file import OverheadsSection
from mooncake_lite.simulator.cluster import Cluster as Simulated
from mooncake_lite.simulator.intervals import FIGURES, drawn, intervals
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.trace_source import TraceSource
from mooncake_lite.tools.bench.cluster import model_folder
from mooncake_lite.tools.bench.result import Other, Row
from mooncake_lite.tools.bench.simulator_live import (
    Ranks,
    Result,
    few_layers,
    overheads_of,
    play_live,
    sleeping_profile,
)
from mooncake_lite.tools.workload import sessions_of
from mooncake_lite.workloads.rescale import divided, sped, spread
from mooncake_lite.workloads.traces import Trace, read_trace
from store.allocator import padded_size

DIVIDE = 16
"""Lengths of the trace are divided by it."""

SLO_S = (30.0, 0.1)
USUAL, OVERLOADED = 0.7, 1.2
"""Load: share of the time of the prefill ranks that prompts take. Above 1 their queues grow to the end."""

HELD_OUT = (0.4, 0.9)
"""Loads of the first and of the last run that intervals are tried on."""

GOALS = {
    "mean TTFT": ("ttft_s", "mean", 5.0),
    "P99 TTFT": ("ttft_s", "p99", 10.0),
    "mean TPOT": ("tpot_s", "mean", 2.0),
    "mean E2E": ("e2e_s", "mean", 3.0),
}
"""Name -> where it stands in a result, and the error in % that is aimed at under the usual load."""

HARD_GOALS = {"mean TTFT": ("ttft_s", "mean", 10.0)}
"""The same under overload, and with a pool that holds a third of the blocks."""

COVERED = ("ttft_s", "tpot_s", "e2e_s")
LEAST_COVERED = 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How much is played: requests of a run, live runs of the usual load, runs that intervals are tried on,
    and simulated runs that an interval is made from."""

    requests: int = 500
    repeats: int = 5
    held_out: int = 20
    held_out_requests: int = 100
    simulated: int = 8

    @property
    def all_requests(self) -> int:
        """Return how many requests are sent to live clusters."""
        return (self.repeats + 2) * self.requests + self.held_out * self.held_out_requests


QUICK = Plan(requests=60, repeats=2, held_out=2, held_out_requests=30, simulated=4)


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure. Raises ClusterError, ModelError, TraceError."""
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-") as place:
        return Bench(few_layers(model_folder(folder), Path(place)), QUICK if quick else Plan()).rows()


def conversation(requests: int) -> Trace:
    """Return the first requests of the public trace, or as many of made conversations."""
    if place := os.environ.get("MOONCAKE_LITE_TRACES"):
        trace = read_trace(Path(place) / "conversation_trace.jsonl").first(requests)
    else:
        trace = sessions_of(requests, 3.4, seed=1)
    return spread(divided(trace, DIVIDE), seed=1)


class Bench:
    """A live cluster, and the simulated one that is to be like it."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.plan = plan
        nodes = {"prefill": 4, "decode": 4, "store": 2}
        self.ranks = Ranks(
            folder, sleeping_profile(folder), nodes, 512 // DIVIDE, 512, 64, 512 << 20, 512 << 20
        )
        self._runs = 0

    def rows(self) -> list[Row]:
        """Play everything, live and simulated."""
        plan = self.plan
        whole = conversation(plan.requests + plan.held_out * plan.held_out_requests)
        first = whole.first(plan.requests)
        usual, overloaded = self._at(first, USUAL), self._at(first, OVERLOADED)
        slices, small = self._slices(whole), self._a_third(first)
        with counted("requests", plan.all_requests) as told:
            with self.ranks.serve() as cluster:
                self._learn(overheads_of(cluster.port))
                lives = [self._live(cluster.port, usual, told) for _ in range(plan.repeats)]
                over = self._live(cluster.port, overloaded, told)
                held_out = [self._live(cluster.port, one, told) for one in slices]
            with small.serve() as cluster:
                thrashed = self._live(cluster.port, usual, told)
        rows = self._compared("usual load", lives, self._simulate(usual), GOALS)
        rows += self._compared("1.2 times the capacity", [over], self._simulate(overloaded), HARD_GOALS)
        too_small = self._simulate(usual, small.pool_bytes)
        rows += self._compared("a third of the blocks fit", [thrashed], too_small, HARD_GOALS)
        return rows + self._covered(slices, held_out)

    # ------------------------------------------------------------------------------ what is played

    def _at(self, trace: Trace, load: float) -> Trace:
        """Return a trace at a speed at which its prompts are such a load for the prefill ranks."""
        busy_s = self._simulate(trace)["prefill_s_per_request"] * len(trace.requests)
        span_s = (trace.requests[-1].timestamp - trace.requests[0].timestamp) / 1000
        return sped(trace, load * self.ranks.nodes["prefill"] * span_s / busy_s)

    def _slices(self, whole: Trace) -> list[Trace]:
        """Return the runs that intervals are tried on, from the rest of the trace."""
        plan, (least, most) = self.plan, HELD_OUT
        found = []
        for number in range(plan.held_out):
            begin = plan.requests + number * plan.held_out_requests
            part = whole.requests[begin : begin + plan.held_out_requests]
            moved = [replace(one, timestamp=one.timestamp - part[0].timestamp) for one in part]
            load = least + (most - least) * number / plan.held_out
            found.append(self._at(dataclasses.replace(whole, requests=moved), load))
        return found

    def _a_third(self, trace: Trace) -> Ranks:
        """Return ranks whose pool holds a third of the blocks of a trace."""
        blocks = len({number for request in trace.requests for number in request.hash_ids})
        block_bytes = padded_size(self._simulated(self.ranks.pool_bytes).layout.nbytes)
        return dataclasses.replace(
            self.ranks, pool_bytes=blocks * block_bytes // (3 * self.ranks.nodes["store"])
        )

    # ------------------------------------------------------------------------------ both sides

    def _live(self, port: int, trace: Trace, told: Callable[[], None]) -> Result:
        self._runs += 1
        return play_live(port, trace, self._runs, told, SLO_S)

    def _simulated(self, pool_bytes: int) -> Simulated:
        """Return the cluster that is to be like the live one."""
        ranks = self.ranks
        return Simulated(
            profile=ranks.profile, nodes=ranks.nodes, together=True, block_tokens=ranks.block_tokens,
            node_bytes=pool_bytes, kv_bytes=ranks.kv_bytes, batched_tokens=ranks.chunk_tokens,
            sequences=ranks.sequences, sharing="hash",
        )  # fmt: skip

    def _simulate(self, trace: Trace, pool_bytes: int = 0, seed: int = 0) -> Result:
        """Play a trace on it. Seed 0 has the profile as it is."""
        cluster = self._simulated(pool_bytes or self.ranks.pool_bytes)
        if seed:
            cluster = drawn(cluster, {}, seed)
        return play(cluster, TraceSource(trace), seed).to_dict(*SLO_S)

    # ------------------------------------------------------------------------------ figures

    def _compared(
        self,
        case: str,
        lives: Sequence[Result],
        simulated: Result,
        goals: Mapping[str, tuple[str, str, float]],
    ) -> list[Row]:
        """Return two rows for each figure: both values, and the error beside the goal."""
        rows, count = [], len(lives)
        for name, (key, statistic, goal) in goals.items():
            found = [live[key][statistic] for live in lives]
            ours, live = simulated[key][statistic], fmean(found)
            spread_of = 100 * max(abs(one / live - 1) for one in found)
            beside = Other("spread of the live runs", spread_of) if count > 1 else None
            error = 100 * abs(ours / live - 1)
            rows.append(Row(f"{case}: {name}", "s", ours, Other("live", live), None, count))
            rows.append(Row(f"{case}: {name}, error", "% off", error, beside, Other("the goal", goal), count))
        live_hits = fmean(live["hit_rate"]["all"] for live in lives)
        rows.append(
            Row(
                f"{case}: tokens reused",
                "%",
                100 * simulated["hit_rate"]["all"],
                Other("live", 100 * live_hits),
                None,
                count,
            )
        )
        return rows

    def _covered(self, slices: Sequence[Trace], lives: Sequence[Result]) -> list[Row]:
        """Return for how many runs the live mean lies in the interval of the simulated ones."""
        within = dict.fromkeys(COVERED, 0)
        for trace, live in zip(slices, lives, strict=True):
            found = intervals([self._simulate(trace, seed=seed) for seed in range(self.plan.simulated)])
            for name in COVERED:
                low, high = found[name]
                within[name] += low <= (FIGURES[name](live) or 0.0) <= high
        count = len(slices)
        goal = Other("the goal", LEAST_COVERED * count)
        return [
            Row(f"live mean {name[:-2].upper()} in its 90 % interval", f"of {count}", hits, None, goal, count)
            for name, hits in within.items()
        ]

    def _learn(self, overheads: OverheadsSection) -> None:
        self.ranks = dataclasses.replace(
            self.ranks, profile=self.ranks.profile.with_section("overheads", overheads)
        )

"""Goodput of a cluster of sleeping ranks below and above its capacity, by form of admission.

Run by `bench.command`. Goodput counts the requests that are served within both of their limits, on TTFT and
on TPOT. Explained in docs/explain/conductor.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mooncake_lite.config.progress import counted
from mooncake_lite.launch.serve_child import Cluster
from mooncake_lite.model.config import load_config
from mooncake_lite.profiles.costs import costs_of
from mooncake_lite.profiles.file import Profile
from mooncake_lite.tools.bench.cluster import Reply, at_their_times, model_folder, scaled_profile
from mooncake_lite.tools.bench.goodput_load import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    SLOWER,
    Load,
    Served,
    Shape,
    memory_of,
    served,
    sleepers,
    thirds,
)
from mooncake_lite.tools.bench.result import Other, Row
from scheduler.admission import ADMISSIONS

FORMS = tuple(ADMISSIONS)
WATCHED = "early-rejection"
"""The form whose goodput, refusals and memory are watched for longer, at the highest load."""

GOOD_SHARE = 0.9
"""Capacity is the highest rate at which so many requests are served within their limits."""

SHAPE = Shape()

REFUSAL_GOAL = Other("the goal", 50.0)


@dataclass(frozen=True, slots=True)
class GoodputPlan:
    """What is offered, and for how long.

    loads    of each form, as multiples of the capacity
    warm_s   seconds before each window: longer than a request lives, so the beginning does not count
    probes   rates at which the capacity is looked for, by bisection; probe_s: seconds at each
    watch_s  seconds at the highest load for WATCHED
    """

    loads: tuple[float, ...] = (0.5, 1.0, 2.0, 10.0)
    forms: tuple[str, ...] = FORMS
    shape: Shape = SHAPE
    probes: int = 4
    probe_s: float = 30.0
    warm_s: float = 10.0
    window_s: float = 20.0
    watch_s: float = 60.0


FULL = GoodputPlan()
QUICK = GoodputPlan(
    loads=(1.0, 10.0),
    forms=("none", WATCHED),
    shape=Shape(2, 1),
    probes=0,
    warm_s=1.0,
    window_s=5.0,
    watch_s=0.0,
)


class Cell(NamedTuple):
    """One form of admission at one load."""

    form: str
    load: float
    served: Served


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure. Raises ClusterError, ConfigError, ModelError.

    folder   of the model; the default model where it is None
    """
    plan = QUICK if quick else FULL
    folder = model_folder(folder)
    bench = Bench(folder, scaled_profile(folder, SLOWER), plan)
    with counted("loads", plan.probes + len(plan.forms) * len(plan.loads) + bool(plan.watch_s)) as told:
        capacity = bench.capacity(told)
        cells = [cell for form in plan.forms for cell in bench.form(form, capacity, told)]
        rows = capacity_rows(plan, capacity) + cell_rows(cells)
        return rows + (bench.watch(capacity, told) if plan.watch_s else [])


class Bench:
    """Clusters of one shape, and the loads that they are offered.

    folder, profile   of the model that is emulated
    slo_s             limits of every request: (TTFT, TPOT), in seconds
    """

    def __init__(self, folder: Path, profile: Profile, plan: GoodputPlan) -> None:
        self._folder, self._profile, self._plan = folder, profile, plan
        self._vocab_size = load_config(folder).vocab_size
        self.slo_s = plan.shape.slo_ttft_ms / 1e3, plan.shape.slo_tpot_ms / 1e3

    def estimate(self) -> float:
        """Return the rate that the prefill ranks can sustain by their profile."""
        prefill = costs_of(self._profile).prefill
        return self._plan.shape.prefill / float(prefill.seconds(sum(PROMPT_TOKENS) / 2, 0))

    def capacity(self, told: Callable[[], None]) -> float:
        """Find the highest rate at which GOOD_SHARE of all requests are served in time, without admission.

        With no probes it is 0.7 times the estimate.
        """
        low, high = 0.7 * self.estimate(), 1.1 * self.estimate()
        if not self._plan.probes:
            return low
        with self._cluster("none") as cluster:
            for _ in range(self._plan.probes):
                middle = (low + high) / 2
                load = Load(middle, self._plan.warm_s, self._plan.probe_s)
                if self._offer(cluster, load)[0].good_share >= GOOD_SHARE:
                    low = middle
                else:
                    high = middle
                told()
        return low

    def form(self, form: str, capacity: float, told: Callable[[], None]) -> list[Cell]:
        """Offer every load to a cluster with one form of admission."""
        cells, plan = [], self._plan
        with self._cluster(form) as cluster:
            for load in plan.loads:
                found, _ = self._offer(cluster, Load(load * capacity, plan.warm_s, plan.window_s))
                cells.append(Cell(form, load, found))
                told()
        return cells

    def watch(self, capacity: float, told: Callable[[], None]) -> list[Row]:
        """Offer the highest load to WATCHED for longer, and watch the memory of the control plane."""
        most = max(self._plan.loads)
        load = Load(most * capacity, self._plan.warm_s, self._plan.watch_s)
        with self._cluster(WATCHED) as cluster:
            found, memory = self._offer(cluster, load)
        told()
        rows = [_refusal(found, f"{WATCHED} at {most:g} x capacity for {load.window_s:g} s: median refusal")]
        for name, samples in memory.items():
            before, after = (value / 2**20 for value in thirds(samples))
            what = f"{name} at {most:g} x capacity, {found.offered:,} requests: memory at the end"
            rows.append(
                Row(what, "MiB", after, None, Other("in the middle of the run", before), found.offered)
            )
        return rows

    def _cluster(self, admission: str) -> AbstractContextManager[Cluster]:
        return sleepers(self._folder, self._profile, self._plan.shape, admission)

    def _offer(self, cluster: Cluster, load: Load) -> tuple[Served, Mapping[str, Sequence[int]]]:
        """Offer a load. Each client waits for as long as an answer within its limits can take."""
        ttft_s, tpot_s = self.slo_s
        patience_s = ttft_s + NEW_TOKENS[1] * tpot_s
        asks = load.asks(self._vocab_size, 0)

        async def offer() -> tuple[list[Reply], dict[str, list[int]]]:
            async with memory_of(cluster.pid) as memory:
                return await at_their_times(cluster.port, asks, lambda: None, patience_s), memory

        replies, memory = asyncio.run(offer())
        return served(replies, load, ttft_s, tpot_s), memory


def capacity_rows(plan: GoodputPlan, capacity: float) -> list[Row]:
    """Return the row of the capacity."""
    shape = plan.shape
    name = (
        f"capacity of {shape.prefill} + {shape.decode} sleeping ranks: {GOOD_SHARE:.0%} within "
        f"{shape.slo_ttft_ms:g} ms to the first token and {shape.slo_tpot_ms:g} ms between tokens"
    )
    return [Row(name, "requests/s", capacity, None, None, plan.probes)]


def cell_rows(cells: Sequence[Cell]) -> list[Row]:
    """Return goodput by form and load, beside no admission and the best of all, and the refusals."""
    plain = {cell.load: cell.served.goodput for cell in cells if cell.form == "none"}
    best = Other("the best of all", max(cell.served.goodput for cell in cells))
    rows = [
        Row(
            f"goodput at {cell.load:g} x capacity, {cell.form}", "requests/s", cell.served.goodput,
            Other("none", plain[cell.load]) if cell.load in plain and cell.form != "none" else None, best,
            cell.served.offered,
        )
        for cell in cells
    ]  # fmt: skip
    for cell in cells:
        if cell.served.refusal_s is not None:
            rows.append(_refusal(cell.served, f"refusal at {cell.load:g} x capacity, {cell.form}: median"))
    return rows


def _refusal(found: Served, name: str) -> Row:
    assert found.refusal_s is not None
    return Row(name, "ms", 1e3 * found.refusal_s, None, REFUSAL_GOAL, found.refused)

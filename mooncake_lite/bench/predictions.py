"""Predicted against measured time to first token: requests one at a time, then overlapping ones.

Run by `bench.command`. A cluster of four ranks with the real engine answers. The client measures, and a
recording tells what the conductor predicted. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mooncake_lite.bench.engine_cluster import START_LIMIT_S
from mooncake_lite.bench.open_loop import Ask, Reply, at_their_times, one_at_a_time, send
from mooncake_lite.bench.predictions_pairs import predicted_ttft_s
from mooncake_lite.bench.predictions_workload import MAX_TOKENS, NEW_TOKENS, Workload
from mooncake_lite.bench.result import Other, Row
from mooncake_lite.config import DEFAULT_MODEL, ServeConfig
from mooncake_lite.demo.cluster import Cluster
from mooncake_lite.errors import ClusterError
from mooncake_lite.model import load_config, resolve_model
from mooncake_lite.model.progress import console_progress
from mooncake_lite.profiles.costs import serving_costs
from mooncake_lite.progress import counted
from mooncake_lite.sizes import block_layout

ALONE, TOGETHER = "one at a time", "overlapping"

GOAL_SHARE, GOAL_ERROR = Other("the goal", 90.0), Other("the goal", 30.0)
"""Of requests one at a time, so many % within WITHIN; of overlapping ones, the median error in %."""

WITHIN = 0.2

TIERS = {"": "nothing", "pages": "pages of the rank", "dram": "DRAM", "ssd": "SSD"}
"""Where the reused tokens of a prompt were: the slowest tier of those that it met."""

PAGES_TOKENS, POOL_TOKENS = 2112, 6144
"""KV that a rank and the pool hold: less than the prompts have together, so that every tier is met."""


@dataclass(frozen=True, slots=True)
class Plan:
    """requests: of each of the two replays; load: share of the capacity that the overlapping ones offer."""

    requests: int
    load: float = 0.7


FULL, QUICK = Plan(200), Plan(16)


class Compared(NamedTuple):
    """One request: what was reused of its prompt (a key of TIERS), and both times."""

    tier: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Return how far the prediction is off, as a share of the measured time."""
        return abs(self.predicted_s / self.measured_s - 1)


def run(quick: bool, folder: Path | None = None) -> list[Row]:
    """Measure. Raises ClusterError, ModelError, RecordingError.

    folder   of the model; the default model where it is None
    """
    if folder is None:
        with console_progress() as progress:
            folder = resolve_model(DEFAULT_MODEL, progress=progress)
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-") as place:
        flags = profile_flags(folder, Path(place) / "profile.json")
        alone, together = measure(folder, QUICK if quick else FULL, flags, Path(place))
    return rows(ALONE, alone) + rows(TOGETHER, together)


def profile_flags(folder: Path, out: Path) -> list[str]:
    """Return the flags of `serve` that give the conductor a profile of this machine.

    The cluster takes the shipped profile if that is of this kind of machine. If not, one is measured.
    """
    if not serving_costs(ServeConfig(model=str(folder)), folder, load_config(folder)).is_guess:
        return []
    command = [sys.executable, "-m", "mooncake_lite", "profile", str(folder), "--quick", "--out", str(out)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ClusterError(f"no profile of this machine: {done.stdout.strip().splitlines()[-1:]}")
    return ["--profile", str(out)]


def measure(
    folder: Path, plan: Plan, flags: Sequence[str], place: Path
) -> tuple[list[Compared], list[Compared]]:
    """Replay requests one at a time, then overlapping. Raises ClusterError.

    flags   further ones of `serve`
    place   a folder for the recording and the SSD tier
    """
    vocab_size, record = load_config(folder).vocab_size, place / "record"
    flags = [*cluster_flags(folder), *flags, "--ssd-dir", str(place / "tier"), "--record", str(record)]
    with Cluster(flags, place / "log") as cluster, counted("requests", 2 * plan.requests) as told:
        cluster.wait_ready(START_LIMIT_S)
        port = cluster.port
        asyncio.run(send(port, Ask(0.0, [1] * 32, 2)))
        alone = asyncio.run(one_at_a_time(port, Workload(vocab_size, 1).asks(plan.requests), told))
        each_s = statistics.fmean(reply.whole_s for reply in alone)
        asks = Workload(vocab_size, 2).asks(plan.requests, each_s / plan.load)
        together = asyncio.run(at_their_times(port, asks, told))
    predicted_s = predicted_ttft_s(record)
    return compared(alone, predicted_s), compared(together, predicted_s)


def cluster_flags(folder: Path) -> list[str]:
    """Return the flags of four ranks with little memory, so that prompts are reused from every tier."""
    config, model = ServeConfig(model=str(folder)), load_config(folder)
    token_nbytes = block_layout(config, model).nbytes // config.block_size
    return [
        *(str(folder), "--prefill", "1", "--decode", "1", "--store", "1"),
        *("--max-model-len", str(MAX_TOKENS + NEW_TOKENS[1])),
        *("--kv-cache-bytes", str(PAGES_TOKENS * token_nbytes)),
        *("--pool-bytes", str(POOL_TOKENS * token_nbytes)),
    ]


def compared(replies: Sequence[Reply], predicted_s: dict[str, float]) -> list[Compared]:
    """Put what was predicted beside what the client measured. Raises ClusterError for a refused request."""
    found = []
    for reply in replies:
        if reply.status != 200:
            raise ClusterError(f"the cluster answered a request with HTTP {reply.status}")
        cached = reply.trace.get("cached_tokens", {})
        tier = next((name for name in ("ssd", "dram", "pages") if cached.get(name)), "")
        found.append(Compared(tier, predicted_s[reply.request_id], reply.ttft_s))
    return found


def rows(name: str, found: Sequence[Compared]) -> list[Row]:
    """Return the figures of one replay."""
    count, errors = len(found), [one.error for one in found]
    usual_s = statistics.median(one.measured_s for one in found)
    blind = [abs(usual_s / one.measured_s - 1) for one in found]
    share, alone = f"within {WITHIN:.0%} of measured TTFT", name == ALONE
    made = [
        Row(
            *(f"{name}: predictions {share}", "% of requests", 100 * within(errors)),
            *(Other("always the median TTFT", 100 * within(blind)), GOAL_SHARE if alone else None, count),
        ),
        Row(
            *(f"{name}: median error", "% off", 100 * statistics.median(errors)),
            *(Other("always the median TTFT", 100 * statistics.median(blind)), None if alone else GOAL_ERROR),
            count,
        ),
    ]
    for tier, words in TIERS.items():
        if some := [one.error for one in found if one.tier == tier]:
            what = f"{name}, {words} reused: median error"
            made.append(Row(what, "% off", 100 * statistics.median(some), None, None, len(some)))
    return made


def within(errors: Sequence[float]) -> float:
    """Return the share of errors that are at most WITHIN."""
    return sum(error <= WITHIN for error in errors) / len(errors)

"""Predicted against measured time to first token: requests one at a time, then overlapping ones.

Run by `bench.command`. A cluster of four ranks with the real engine answers. The client measures, and a
recording tells what the conductor predicted. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mooncake_lite.conductor.recording import Recording
from mooncake_lite.config.progress import counted
from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.control import Control
from mooncake_lite.control.effects import Decided
from mooncake_lite.control.events import RequestArrived
from mooncake_lite.errors import ClusterError
from mooncake_lite.model.config import load_config
from mooncake_lite.model.sizes import block_layout
from mooncake_lite.profiles.costs import serving_costs
from mooncake_lite.tools.bench.cluster import FOUR_RANKS, Ask, Reply, answers, model_folder, started
from mooncake_lite.tools.bench.result import Other, Row
from mooncake_lite.tools.client import TRACED

LOAD = 0.7
"""Share of the capacity that the overlapping requests offer."""

MAX_TOKENS = 1024
"""Of a prompt, at most; 64 at least."""

DOCUMENTS = 16
"""Beginnings that prompts share, of 64 to 768 tokens."""

SHARING = 2 / 3
NEW_TOKENS = (8, 32)

ALONE, TOGETHER = "one at a time", "overlapping"

GOAL_SHARE, GOAL_ERROR = Other("the goal", 90.0), Other("the goal", 30.0)
"""Of requests one at a time, so many % within WITHIN; of overlapping ones, the median error in %."""

WITHIN = 0.2

TIERS = {"": "nothing", "pages": "pages of the rank", "dram": "DRAM", "ssd": "SSD"}
"""Where the reused tokens of a prompt were: the slowest tier of those that it met."""

PAGES_TOKENS, POOL_TOKENS = 2112, 6144
"""KV that a rank and the pool hold: less than the prompts have together, so that every tier is met."""


@dataclass(frozen=True, slots=True)
class Workload:
    """vocab_size: of the model. Requests of another seed share no prefix with these."""

    vocab_size: int
    seed: int

    def asks(self, count: int, every_s: float = 0.0) -> list[Ask]:
        """Make requests that arrive as a Poisson process, one every `every_s` seconds in the mean."""
        chosen = random.Random(f"requests {self.seed}")
        documents = [self._tokens(chosen, 64, 768) for _ in range(DOCUMENTS)]
        asks, at_s = [], 0.0
        for _ in range(count):
            prompt = self._tokens(chosen, 64, MAX_TOKENS)
            if chosen.random() < SHARING:
                prompt = (chosen.choice(documents) + self._tokens(chosen, 16, 256))[:MAX_TOKENS]
            asks.append(Ask(at_s, prompt, chosen.randint(*NEW_TOKENS), TRACED))
            at_s += chosen.expovariate(1.0) * every_s
        return asks

    def _tokens(self, chosen: random.Random, least: int, most: int) -> list[int]:
        """Draw tokens. The first eighth of the ids is left out: control tokens and single bytes are there."""
        ids = range(self.vocab_size // 8, self.vocab_size)
        return chosen.choices(ids, k=chosen.randint(least, most))


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
    folder = model_folder(folder)
    with tempfile.TemporaryDirectory(prefix="mooncake-lite-bench-") as place:
        flags = profile_flags(folder, Path(place) / "profile.json")
        alone, together = measure(folder, 16 if quick else 200, flags, Path(place))
    return rows(ALONE, alone) + rows(TOGETHER, together)


def profile_flags(folder: Path, out: Path) -> list[str]:
    """Return the flags of `serve` that give the conductor a profile of this machine.

    The cluster takes the shipped profile if that is of this kind of machine. If not, one is measured.
    """
    if not serving_costs(ServeConfig(model=str(folder)), folder, load_config(folder)).is_guess:
        return []
    measure_profile(folder, out)
    return ["--profile", str(out)]


def measure_profile(folder: Path, out: Path, *more: str) -> None:
    """Measure a profile of this machine. more: further words of the command. Raises ClusterError."""
    command = [
        sys.executable,
        "-m",
        "mooncake_lite",
        "profile",
        str(folder),
        "--quick",
        "--out",
        str(out),
        *more,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ClusterError(f"no profile of this machine: {done.stdout.strip().splitlines()[-1:]}")


def measure(
    folder: Path, requests: int, flags: Sequence[str], place: Path
) -> tuple[list[Compared], list[Compared]]:
    """Replay requests one at a time, then as many overlapping ones. Raises ClusterError.

    flags   further ones of `serve`
    place   a folder for the recording and the SSD tier
    """
    vocab_size, record = load_config(folder).vocab_size, place / "record"
    flags = [*cluster_flags(folder), *flags, "--ssd-dir", str(place / "tier"), "--record", str(record)]
    with started(flags) as cluster, counted("requests", 2 * requests) as told:
        alone = []
        for ask in Workload(vocab_size, 1).asks(requests):
            alone += answers(cluster.port, [ask], told)
        each_s = statistics.fmean(reply.whole_s for reply in alone)
        asks = Workload(vocab_size, 2).asks(requests, each_s / LOAD)
        together = answers(cluster.port, asks, told)
    predicted_s = predicted_ttft_s(record)
    return compared(alone, predicted_s), compared(together, predicted_s)


def cluster_flags(folder: Path) -> list[str]:
    """Return the flags of four ranks with little memory, so that prompts are reused from every tier."""
    config, model = ServeConfig(model=str(folder)), load_config(folder)
    token_nbytes = block_layout(config, model).nbytes // config.block_size
    return [
        *(str(folder), *FOUR_RANKS),
        *("--max-model-len", str(MAX_TOKENS + NEW_TOKENS[1])),
        *("--kv-cache-bytes", str(PAGES_TOKENS * token_nbytes)),
        *("--pool-bytes", str(POOL_TOKENS * token_nbytes)),
    ]


def compared(replies: Sequence[Reply], predicted_s: dict[str, float]) -> list[Compared]:
    """Put what was predicted beside what the client measured."""
    found = []
    for reply in replies:
        cached = reply.trace.get("cached_tokens", {})
        tier = next((name for name in ("ssd", "dram", "pages") if cached.get(name)), "")
        found.append(Compared(tier, predicted_s[reply.request_id], reply.ttft_s))
    return found


def predicted_ttft_s(file: Path) -> dict[str, float]:
    """Return the predicted seconds from arrival to first token, by request id. Raises RecordingError.

    The first placement of a request counts. The time that it was held before is part of its prediction.
    """
    arrived_s: dict[str, float] = {}
    found: dict[str, float] = {}
    with closing(Recording(file)) as recording:
        control = Control(recording.header.config)
        for entry in recording.entries():
            if isinstance(entry.event, RequestArrived):
                arrived_s[entry.event.request_id] = entry.now
            for effect in control.on(entry.event, entry.now):
                if isinstance(effect, Decided):
                    held_s = entry.now - arrived_s[effect.request_id]
                    found.setdefault(effect.request_id, held_s + effect.terms.ttft_s)
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

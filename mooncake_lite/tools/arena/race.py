"""A race: conversations on simulated clusters that are nearly full, and what a policy makes of them.

Used by `command.py` and `bots.py`. The score is goodput: requests per second within both limits, over all
that were offered. A race has RUNS runs with seeds of their own, because a single one may be luck. Equal seeds
give equal races on every host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import msgspec
import numpy as np

from mooncake_lite.profiles.file import named_profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.sessions import SessionMix, Sessions
from mooncake_lite.simulator.workload import mixed
from mooncake_lite.workloads.metrics import is_within

PROFILE = "LLaMA3-70B-8xA800"
NODES = 4
"""That prefill, and that decode."""

LINK_BYTES_PER_S = 12.5e9
"""Of a node, each way: 100 Gbps. On faster links fetches are nearly free, and what fetches is alike."""

MIX = SessionMix(documents=12, document_tokens=(6_144, 24_576), question_tokens=2_000, turns=1.5)
"""A few documents are asked about again and again, so the nodes that have them send a lot."""

TTFT_S, TBT_S = 5.0, 1.0
"""Limits. A placement policy decides where prompts are computed, so the limit on TBT is a wide one."""

RATE = 6.0
"""Requests per second, of which the best of our policies serves 78 of 100 in time in the public race."""

RUNS, REQUESTS, PUBLIC_SEED = 5, 200, 1
"""Runs of a race, requests of each, and the seed of the public race."""

STUDENT_T = 2.132
"""Of 4 degrees of freedom: a mean over five runs lies within this many standard errors in 90 of 100 races."""

POINTS = 40
"""Of the curve of a run."""


class Score(msgspec.Struct, frozen=True):
    """What a run came to.

    goodput_rps   requests within both limits, per second from the first arrival to the last
    share         of all requests that were within both
    ttft_s        mean time to first token
    curve         share of all requests that had come and were within both, at POINTS even times
    """

    goodput_rps: float
    share: float
    ttft_s: float
    curve: list[float]


Told = Callable[[int], None]
Scores = Sequence[Score]
"""Of the runs of a race, in their order."""


@dataclass(frozen=True, slots=True)
class Race:
    """Workloads. Other seeds are other conversations: no key and no id of them is the same.

    requests   of each run
    """

    requests: int = REQUESTS
    seed: int = PUBLIC_SEED

    def run(self, policy: str, number: int, told: Told | None = None) -> Score:
        """Play one of the RUNS runs with a policy, by its name in POLICIES.

        told   gets the number of requests that have ended
        """
        cluster = Cluster(
            profile=named_profile(PROFILE), nodes={"prefill": NODES, "decode": NODES}, policy=policy,
            link_bytes_per_s=LINK_BYTES_PER_S,
        )  # fmt: skip
        seed = mixed(self.seed, number)
        source = Sessions(seed, self.requests, RATE, MIX, cluster.block_tokens)
        records = play(cluster, source, seed, told=told).records
        good = [one for one in records if is_within(one, TTFT_S, TBT_S)]
        begin_s, end_s = records[0].arrived_s, records[-1].arrived_s
        times = np.linspace(begin_s, end_s, POINTS)
        reached = np.searchsorted([one.arrived_s for one in good], times, side="right") / len(records)
        span_s = max(end_s - begin_s, 1e-9)
        ttft_s = float(np.mean([one.ttft_s for one in records]))
        return Score(len(good) / span_s, len(good) / len(records), ttft_s, reached.round(4).tolist())


def goodput(scores: Scores) -> tuple[float, float]:
    """Return the mean over the runs, and half of its 90 % interval."""
    found = [one.goodput_rps for one in scores]
    return fmean(found), STUDENT_T * stdev(found) / len(found) ** 0.5

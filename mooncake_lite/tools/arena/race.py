"""A race: conversations on a simulated cluster that is nearly full, and what a policy makes of them.

Used by `command.py` and `bots.py`. The score is goodput: requests per second within both limits, over all
that were offered. Equal seeds give equal races on every host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from mooncake_lite.profiles.file import named_profile
from mooncake_lite.simulator.compare_policies import experiment_of
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.sessions import Sessions
from mooncake_lite.workloads.metrics import is_within

PROFILE = "LLaMA3-70B-8xA800"
NODES = 4
"""That prefill, and that decode."""

RATE = 4.1
"""Requests per second, of which the best of our policies serves 96 of 100 in time in the public race."""

REQUESTS, PUBLIC_SEED = 3_000, 1
POINTS = 60
"""Of the curve of a race."""


class Score(msgspec.Struct, frozen=True):
    """What a race came to.

    goodput_rps   requests within both limits, per second from the first arrival to the last
    share         of all requests that were within both
    ttft_s        mean time to first token
    curve         share of all requests that had come and were within both, at POINTS even times
    """

    goodput_rps: float
    share: float
    ttft_s: float
    curve: list[float]


@dataclass(frozen=True, slots=True)
class Race:
    """A workload. Other seeds are other conversations: no key and no id of them is the same."""

    requests: int = REQUESTS
    seed: int = PUBLIC_SEED

    def run(self, policy: str, told: Callable[[int], None] | None = None) -> Score:
        """Play a policy, by its name in POLICIES. told: gets the number of requests that have ended."""
        experiment = experiment_of(named_profile(PROFILE), NODES, NODES, self.requests).on(policy=policy)
        cluster = experiment.cluster
        source = Sessions(self.seed, self.requests, RATE, experiment.mix, cluster.block_tokens)
        records = play(cluster, source, self.seed, told=told).records
        good = [one for one in records if is_within(one, cluster.ttft_s, cluster.tbt_s)]
        begin_s, end_s = records[0].arrived_s, records[-1].arrived_s
        times = np.linspace(begin_s, end_s, POINTS)
        reached = np.searchsorted([one.arrived_s for one in good], times, side="right") / len(records)
        span_s = max(end_s - begin_s, 1e-9)
        ttft_s = float(np.mean([one.ttft_s for one in records]))
        return Score(len(good) / span_s, len(good) / len(records), ttft_s, reached.round(4).tolist())

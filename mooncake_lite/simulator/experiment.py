"""Experiments: a simulated cluster with conversations at a given rate.

Used by `compare_policies.py` and `compare_admission.py`. Explained in docs/explain/experiments.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.outcome import Outcome
from mooncake_lite.simulator.play import play
from mooncake_lite.simulator.sessions import SessionMix, Sessions

WARM_UP = 0.25
"""Share of a run's requests, the first ones, that do not count."""

MOST_RATE = 1e5
"""Requests per second, beyond which no capacity is searched: all requests of a run come at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One cluster under one load. rate: requests per second, in the mean."""

    cluster: Cluster
    mix: SessionMix
    rate: float = 1.0
    requests: int = 1_000

    def run(self, seed: int) -> Outcome:
        """Play all requests of a seed until they have ended."""
        source = Sessions(seed, self.requests, self.rate, self.mix, self.cluster.block_tokens)
        return play(self.cluster, source, seed, warm_up=WARM_UP)

    def on(self, **changes: Any) -> Experiment:
        """Return the same load on a cluster with other values of some fields."""
        return replace(self, cluster=replace(self.cluster, **changes))

    def share_within(self, outcome: Outcome) -> float:
        """Return the share of all requests that met both limits of the cluster."""
        return outcome.share_within(self.cluster.ttft_s, self.cluster.tbt_s)


def capacity(
    experiment: Experiment, seed: int, share: float, told: Callable[[], None], steps: int = 7
) -> float:
    """Search for the highest rate, in requests per second, at which this share of requests meets both limits.

    The search doubles the rate of the experiment while that holds, up to MOST_RATE, and then bisects. It
    returns 0 when no rate that it tried holds.

    told    is called after each run
    steps   bisections
    """

    def holds(rate: float) -> bool:
        outcome = replace(experiment, rate=rate).run(seed)
        told()
        return experiment.share_within(outcome) >= share

    low, high = 0.0, experiment.rate
    while high < MOST_RATE and holds(high):
        low, high = high, 2 * high
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

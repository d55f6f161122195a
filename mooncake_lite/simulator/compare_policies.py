"""Compare placement policies: the same requests, at a rate somewhat below the capacity of the best one.

Called by `experiment_commands.py`. Explained in docs/explain/experiments.md.

    1. the capacity of each policy: the highest rate at which GOOD_SHARE of the requests meet both limits
    2. LOAD of the best capacity, for every policy and seed: the mean time to first token
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from mooncake_lite.errors import ConfigError
from mooncake_lite.profiles.costs import costs_of
from mooncake_lite.profiles.file import Profile
from mooncake_lite.simulator.experiment import Experiment, capacity
from mooncake_lite.simulator.sessions import SessionMix

GOOD_SHARE = 0.9
LOAD = 0.8
CAPACITY_SEED = 0
"""Seed of the requests with which capacities are searched; the command compares with seeds 1 and up."""

SLOWEST_FIRST = ("random", "least-loaded", "local-cache", "global-cache", "kvcache-centric")
"""The order of the first four is that of the paper (FAST'25, figure 5)."""

Told = Callable[[], None]


def cluster(profile: Profile, prefills: int, decodes: int, requests: int) -> Experiment:
    """Return an experiment in which most tokens of a prompt are new, as in the paper's traces."""
    mix = SessionMix(documents=1_000, document_tokens=(512, 6_144), question_tokens=6_000, turns=1.5)
    return Experiment(
        seconds=profile.compute.seconds,
        costs=costs_of(profile),
        prefills=prefills,
        decodes=decodes,
        requests=requests,
        mix=mix,
    )


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """The results of one policy.

    capacity      requests per second; None: not searched
    ttft_s        mean time to first token of each seed
    good_shares   share of the requests of each seed that met both limits
    """

    policy: str
    capacity: float | None
    ttft_s: list[float]
    good_shares: list[float]


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """A comparison. rate: requests per second at which the policies are compared."""

    rate: float
    seeds: list[int]
    rows: list[PolicyRow]

    def pairs(self) -> list[tuple[str, str, int]]:
        """Return neighbours in the order of `rows`, and for how many seeds the first one was slower."""
        return [
            (a.policy, b.policy, sum(x > y for x, y in zip(a.ttft_s, b.ttft_s, strict=True)))
            for a, b in pairwise(self.rows)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return what the JSON file has."""
        pairs = [{"slower": a, "faster": b, "seeds": n} for a, b, n in self.pairs()]
        return {
            "rate": self.rate,
            "seeds": self.seeds,
            "rows": [asdict(row) for row in self.rows],
            "pairs": pairs,
        }


def runs_at_most(policies: int, seeds: int, rate: float | None) -> int:
    """Return about how many runs a comparison takes, for a progress bar: 10 for each search of a capacity."""
    return policies * (seeds + (0 if rate else 12))


def compare(
    experiment: Experiment, policies: Sequence[str], seeds: Sequence[int], rate: float | None, told: Told
) -> PolicyResult:
    """Search the capacities unless a rate is given, then run every policy with every seed.

    policies   in the expected order, the slowest first
    rate       requests per second; None: LOAD of the best capacity, which is searched
    told       is called after each run

    Raises ConfigError when no policy has a capacity.
    """
    found: dict[str, float] = {}
    if rate is None:
        for policy in policies:
            found[policy] = capacity(replace(experiment, policy=policy), CAPACITY_SEED, GOOD_SHARE, told)
        rate = LOAD * max(found.values())
        if not rate:
            raise ConfigError(
                f"no policy serves {GOOD_SHARE:.0%} of the requests in time at any rate; "
                "raise --prefills or --decodes, or give a --rate"
            )
    rows = []
    for policy in policies:
        outcomes = []
        for seed in seeds:
            outcomes.append(replace(experiment, policy=policy, rate=rate).run(seed))
            told()
        shares = [one.share_within(experiment.ttft_s, experiment.tbt_s) for one in outcomes]
        rows.append(PolicyRow(policy, found.get(policy), [one.mean_ttft_s for one in outcomes], shares))
    return PolicyResult(rate, list(seeds), rows)


def lines(result: PolicyResult) -> list[list[str]]:
    """Return the rows of the table: policy, capacity, TTFT (median, least, most), share within limits."""
    return [
        [
            row.policy,
            "" if row.capacity is None else f"{row.capacity:.2f}",
            f"{median(row.ttft_s):.2f}",
            f"{min(row.ttft_s):.2f}",
            f"{max(row.ttft_s):.2f}",
            f"{median(row.good_shares):.3f}",
        ]
        for row in result.rows
    ]

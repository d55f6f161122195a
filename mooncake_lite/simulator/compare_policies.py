"""Compare placement policies: the same requests, at a rate somewhat below the capacity of the best one.

Called by `experiment_commands.py`. Explained in docs/explain/experiments.md.

    1. the capacity of each policy: the highest rate at which GOOD_SHARE of the requests meet both limits
    2. LOAD of the best capacity, for every policy and seed: the mean time to first token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from mooncake_lite.errors import ConfigError
from mooncake_lite.profiles.file import Profile
from mooncake_lite.simulator.cluster import Cluster
from mooncake_lite.simulator.compare import Columns, Comparison, Measure, Told, of_seeds
from mooncake_lite.simulator.compare import compare as compare_values
from mooncake_lite.simulator.experiment import Experiment, capacity
from mooncake_lite.simulator.sessions import SessionMix

GOOD_SHARE = 0.9
LOAD = 0.8
"""Capacity is the rate at which 90 % meet their limits. The comparison runs at 80 % of the best: queues
form there, and the best policy is not overloaded."""

CAPACITY_SEED = 0
"""Seed of the requests with which capacities are searched; the command compares with seeds 1 and up."""

SLOWEST_FIRST = ("random", "least-loaded", "local-cache", "global-cache", "kvcache-centric")
"""The order of the first four is that of the paper (FAST'25, figure 5)."""

MEASURES: dict[str, Measure] = {
    "ttft_s": lambda experiment, outcome: outcome.mean_ttft_s,
    "good_shares": Experiment.share_within,
}
"""Mean time to first token, and the share of the requests that met both limits."""


COLUMNS: Columns = {
    "capacity, requests/s": lambda row: format(row.facts["capacity"], ".2f"),
    "mean TTFT, s: median": of_seeds("ttft_s", ".2f"),
    "least": of_seeds("ttft_s", ".2f", min),
    "most": of_seeds("ttft_s", ".2f", max),
    "share within limits": of_seeds("good_shares", ".3f"),
}
"""With a rate that was given, no capacity is known: see `columns`."""


def experiment_of(profile: Profile, prefills: int, decodes: int, requests: int) -> Experiment:
    """Return an experiment in which most tokens of a prompt are new, as in the paper's traces."""
    mix = SessionMix(documents=1_000, document_tokens=(512, 6_144), question_tokens=6_000, turns=1.5)
    cluster = Cluster(profile=profile, nodes={"prefill": prefills, "decode": decodes}, tbt_s=0.2)
    return Experiment(cluster=cluster, requests=requests, mix=mix)


def runs_at_most(policies: int, seeds: int, rate: float | None) -> int:
    """Return about how many runs a comparison takes, for a progress bar: 10 for each search of a capacity."""
    return policies * (seeds + (0 if rate else 12))


def compare(
    experiment: Experiment, policies: Sequence[str], seeds: Sequence[int], rate: float | None, told: Told
) -> Comparison:
    """Search the capacities unless a rate is given, then run every policy with every seed.

    policies   in the expected order, the slowest first
    rate       requests per second; None: LOAD of the best capacity, which is searched

    Raises ConfigError when no policy has a capacity.
    """
    found: dict[str, float] = {}
    if rate is None:
        for policy in policies:
            found[policy] = capacity(experiment.on(policy=policy), CAPACITY_SEED, GOOD_SHARE, told)
        rate = LOAD * max(found.values())
        if not rate:
            raise ConfigError(
                f"no policy serves {GOOD_SHARE:.0%} of the requests in time at any rate; "
                "raise --prefills or --decodes, or give a --rate"
            )
    result = compare_values(replace(experiment, rate=rate), "policy", policies, seeds, MEASURES, told)
    for row in result.rows:
        if found:
            row.facts["capacity"] = found[row.name]
    return result


def columns(result: Comparison) -> Columns:
    """Return the columns of a table: without that of the capacity when none was searched."""
    is_known = all("capacity" in row.facts for row in result.rows)
    return {head: text for head, text in COLUMNS.items() if is_known or not head.startswith("capacity")}


def pairs(result: Comparison) -> list[dict[str, Any]]:
    """Return neighbours in the order of the rows, and for how many seeds the first one was slower."""
    return [
        {"slower": a.name, "faster": b.name, "seeds": result.less("ttft_s", b.name, a.name)}
        for a, b in pairwise(result.rows)
    ]

"""Placement policies, one per file: each ranks the prefill instances, and `choose` takes the best one."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.placement.choose import Candidate, Compared, choose, compare, explain, other_decode
from scheduler.placement.contract import Policy, Ranked
from scheduler.placement.decisions import Decisions, Explanation
from scheduler.placement.dynamo import DynamoCost
from scheduler.placement.global_cache import GlobalCache
from scheduler.placement.kvcache_centric import THRESHOLD, KVCacheCentric
from scheduler.placement.least_loaded import LeastLoaded
from scheduler.placement.local_cache import LocalCache
from scheduler.placement.random_choice import RandomChoice
from scheduler.placement.round_robin import RoundRobin
from scheduler.placement.topology import Topology
from scheduler.placement.two_choices import TwoChoices

POLICIES: dict[str, Callable[[], Policy]] = {
    KVCacheCentric.name: KVCacheCentric,
    GlobalCache.name: GlobalCache,
    Topology.name: Topology,
    LocalCache.name: LocalCache,
    LeastLoaded.name: LeastLoaded,
    TwoChoices.name: TwoChoices,
    RoundRobin.name: RoundRobin,
    RandomChoice.name: RandomChoice,
    DynamoCost.name: DynamoCost,
}
"""By the names that configurations use."""

OTHER_SCORES = {DynamoCost.name: "blocks", RoundRobin.name: "", RandomChoice.name: ""}
"""{policy: unit of its score} for scores that are not in seconds."""

COPYING = frozenset({KVCacheCentric.name})
"""Policies that copy hot blocks to the nodes that read them: the last line of Algorithm 1."""


def policy_of(name: str, balancing_threshold: float = THRESHOLD) -> Policy:
    """Return the policy of this name. balancing_threshold: see KVCacheCentric, the only one that has it."""
    return KVCacheCentric(balancing_threshold) if name == KVCacheCentric.name else POLICIES[name]()

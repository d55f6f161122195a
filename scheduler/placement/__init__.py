"""Placement policies, one per file: each ranks the prefill instances, and `choose` takes the best one.

Importing the package loads no NumPy. The file of a policy is loaded when the policy is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.placement.contract import Policy

THRESHOLD = 1.5
"""A prefix is fetched if it is this many times longer than the near one: kvcache_balancing_threshold.

The paper gives no number for it. At 1.5 a prefix is fetched if more than a third of it is missing near the
instance.
"""


def _new(module: str, name: str, *arguments: float) -> Policy:
    return getattr(importlib.import_module(f"scheduler.placement.{module}"), name)(*arguments)


POLICIES: dict[str, Callable[[], Policy]] = {
    "kvcache-centric": partial(_new, "kvcache_centric", "KVCacheCentric"),
    "global-cache": partial(_new, "global_cache", "GlobalCache"),
    "topology": partial(_new, "topology", "Topology"),
    "local-cache": partial(_new, "local_cache", "LocalCache"),
    "least-loaded": partial(_new, "least_loaded", "LeastLoaded"),
    "two-choices": partial(_new, "two_choices", "TwoChoices"),
    "round-robin": partial(_new, "round_robin", "RoundRobin"),
    "random": partial(_new, "random_choice", "RandomChoice"),
    "dynamo": partial(_new, "dynamo", "DynamoCost"),
}
"""By the names that configurations use."""

OTHER_SCORES = {"dynamo": "blocks", "round-robin": "", "random": ""}
"""{policy: unit of its score} for scores that are not in seconds."""

COPYING = frozenset({"kvcache-centric"})
"""Policies that copy hot blocks to the nodes that read them: the last line of Algorithm 1."""


def policy_of(name: str, balancing_threshold: float = THRESHOLD, far_tokens: int = -1) -> Policy:
    """Return the policy of this name. balancing_threshold: see KVCacheCentric; far_tokens: see Topology."""
    if name == "topology":
        return _new("topology", "Topology", far_tokens)
    if name != "kvcache-centric":
        return POLICIES[name]()
    return _new("kvcache_centric", "KVCacheCentric", balancing_threshold)

"""Eviction policies by name, behind one interface (`store.policies.contract`).

Used by the directory for the live pool and by the simulator's replay. Pure; one policy per file.
Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from store.errors import UnknownPolicy
from store.policies.admission import Filter, Filtered, SecondHit, SizeLimit
from store.policies.arc import ARC
from store.policies.belady import Belady
from store.policies.class_shares import ClassShares
from store.policies.contract import BlockFacts, Policy
from store.policies.gdsf import GDSF
from store.policies.learned import Learned
from store.policies.leaves_first import LeavesFirst
from store.policies.length import LengthAware
from store.policies.lfu import LFU
from store.policies.lru import LRU
from store.policies.s3fifo import S3FIFO
from store.policies.sieve import SIEVE
from store.policies.wtinylfu import WTinyLFU

__all__ = ["FILTERS", "NAMES", "POLICIES", "BlockFacts", "Policy", "policy_factory"]

PolicyFactory = Callable[[int], Policy]
"""Makes the policy of a segment from its capacity in blocks."""

POLICIES: dict[str, PolicyFactory] = {
    "lru": LRU,
    "lfu": LFU,
    "length": LengthAware,
    "s3fifo": S3FIFO,
    "sieve": SIEVE,
    "arc": ARC,
    "gdsf": GDSF,
    "wtinylfu": WTinyLFU,
    "leaves-first": LeavesFirst,
    "learned": Learned,
}
"""Policies that can run live. The oracle is not among them, because it needs the future."""

ORACLE = "belady"
NAMES = (*POLICIES, ORACLE)

FILTERS: dict[str, Callable[[int], Filter]] = {"second-hit": SecondHit, "size": SizeLimit}
"""Filters, which follow the policy after a plus: lru+second-hit, arc+size, lru+second-hit+size."""


def policy_factory(
    name: str, future: Sequence[int] | None = None, shares: Sequence[float] = ()
) -> PolicyFactory:
    """Return what makes the policy of this name, with the filters that follow it.

    future: the items of all references to come, in order, for the oracle; None in a live pool.
    shares: of service classes, the highest first; without any above 0 no class is protected.
    Raises UnknownPolicy for an unknown name, and for the oracle without a future or behind a filter.
    """
    base, *filters = name.split("+")
    if base not in NAMES or any(gate not in FILTERS for gate in filters):
        raise UnknownPolicy(
            f"no eviction policy is called {name!r}; there are {', '.join(NAMES)}, "
            f"and each may be followed by {' or '.join('+' + gate for gate in FILTERS)}"
        )
    if base == ORACLE and filters:
        raise UnknownPolicy(f"{name}: the oracle must see every reference; use it without a filter")
    if base == ORACLE and future is None:
        raise UnknownPolicy(
            f"{name} needs the future and runs in `simulate cache` only; use one of {_live()}"
        )

    def make(capacity: int) -> Policy:
        policy = Belady(capacity, future or ()) if base == ORACLE else POLICIES[base](capacity)
        for gate in reversed(filters):
            policy = Filtered(policy, FILTERS[gate](capacity))
        return policy

    return partial(ClassShares, make=make, shares=shares) if any(shares) else make


def _live() -> str:
    return ", ".join(POLICIES)

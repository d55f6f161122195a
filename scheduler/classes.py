"""Service classes: the weight, cache share and latency limits of each class. Plain data and its checks.

Made by `mooncake_lite.config.service_classes` from the configuration; part of ControlConfig. A class is named
in configurations and by clients; everywhere else it is its index in the list, 0 for the highest class.
Explained in docs/explain/eviction.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf, isfinite

import msgspec

DEFAULT_NAME = "standard"
"""The class of requests that name none, if there is a class of this name; else the lowest class is."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")

ROUNDING = 1e-9
"""Tolerance for a sum of shares above 1: 0.7 + 0.2 + 0.1 exceeds 1 in floating point."""


class ServiceClass(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one class of requests.

    weight        its part of prefill time while several classes wait, compared with the weights of the others
    cache_share   part of each segment's DRAM, 0 to 1, from which no other class evicts its blocks
    slo_ttft_s    time to first token that its requests ask for unless they say otherwise; inf: none
    slo_tbt_s     likewise, time between tokens

    Raises ValueError for a value out of range.
    """

    name: str
    weight: float = 1.0
    cache_share: float = 0.0
    slo_ttft_s: float = inf
    slo_tbt_s: float = inf

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"class {self.name!r}: a name has letters, digits, dots, hyphens and underscores"
            )
        if not (isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"class {self.name}: weight={self.weight:g} must be above 0")
        if not 0 <= self.cache_share <= 1:
            raise ValueError(
                f"class {self.name}: cache_share={self.cache_share:g} must be from 0 (no protection) to 1"
            )
        for name, seconds in (("slo_ttft", self.slo_ttft_s), ("slo_tpot", self.slo_tbt_s)):
            if not seconds > 0:
                raise ValueError(
                    f"class {self.name}: {name}_ms={seconds * 1000:g} must be above 0; "
                    "leave it out for no limit"
                )

    @property
    def has_limit(self) -> bool:
        """Tell whether its requests have a limit on latency."""
        return min(self.slo_ttft_s, self.slo_tbt_s) < inf

    def with_limits(self, slo_ttft_s: float, slo_tbt_s: float) -> ServiceClass:
        """Return a copy with these limits where it has none."""
        own_ttft_s = self.slo_ttft_s if self.slo_ttft_s < inf else slo_ttft_s
        own_tbt_s = self.slo_tbt_s if self.slo_tbt_s < inf else slo_tbt_s
        return msgspec.structs.replace(self, slo_ttft_s=own_ttft_s, slo_tbt_s=own_tbt_s)


DEFAULT_CLASSES = (
    ServiceClass(name="interactive", weight=4.0),
    ServiceClass(name=DEFAULT_NAME, weight=2.0),
    ServiceClass(name="batch", weight=1.0),
)
"""The default classes protect no blocks: all shares are 0."""


def check_classes(classes: Sequence[ServiceClass]) -> None:
    """Raise ValueError for no class, for two of one name, and for shares above 1 in sum."""
    if not classes:
        raise ValueError("there is no service class; name at least one")
    names = [one.name for one in classes]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two service classes are called {name}; rename one of them")
    if (total := sum(one.cache_share for one in classes)) > 1 + ROUNDING:
        shares = " + ".join(f"{one.cache_share:g}" for one in classes if one.cache_share)
        raise ValueError(f"cache_share: {shares} = {total:g} is more than 1; lower a share")


def default_class(classes: Sequence[ServiceClass]) -> int:
    """Return the index of the class of requests that name none."""
    names = [one.name for one in classes]
    return names.index(DEFAULT_NAME) if DEFAULT_NAME in names else len(names) - 1

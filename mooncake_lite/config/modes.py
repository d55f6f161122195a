"""The three modes of a cluster, as data: which roles there are, what they do, and how KV travels.

Read by `serve.py`, the control plane, the roles and the simulator: none of them names a mode. Knows no
processes and no models. Explained in docs/explain/modes.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mooncake_lite.errors import ConfigError

ROLES = ("prefill", "decode", "compute", "store")
"""In the order of rank numbers, after the steward, which is rank 0."""

DUTIES: dict[str, tuple[str, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "compute": ("prefill", "decode"),
    "store": ("store",),
    "stage": (),
    "member": (),
}
"""What a rank of each role does; a stage and a member: what the first rank of its instance tells it."""

COMPUTE_ROLES = (*(role for role in ROLES if role != "store"), "stage", "member")
"""Roles whose ranks have an engine."""

BY_MODE = -1
"""Stands for a number that was not given: the default of the mode is taken."""


Handover = Literal["pool", "direct", "none"]
"""How a prompt's KV comes to the instance that decodes.

"pool"     through blocks of the pool, which stay there for other requests
"direct"   prefill writes it into memory that the decode rank lends for this request alone
"none"     one instance does both
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One way to serve.

    ranks        role -> number of ranks unless a flag says otherwise; other roles have no rank in this mode
    optional     those of `ranks` that a cluster may do without
    handover     of KV from prefill to decode
    lenders      roles that lend DRAM: for the handover, or to the pool if there is one
    lend_bytes   that each of them lends unless a flag says otherwise
    """

    ranks: Mapping[str, int]
    optional: frozenset[str] = frozenset()
    handover: Handover
    lenders: frozenset[str]
    lend_bytes: int = 0


MODES: dict[str, Mode] = {
    "pooled": Mode(
        ranks={"prefill": 1, "decode": 1, "store": 1},
        handover="pool",
        lenders=frozenset({"prefill", "decode"}),
    ),
    "split": Mode(
        ranks={"prefill": 1, "decode": 1},
        handover="direct",
        lenders=frozenset({"decode"}),
        lend_bytes=512 * 2**20,
    ),
    "colocated": Mode(
        ranks={"compute": 2, "store": 0},
        optional=frozenset({"store"}),
        handover="none",
        lenders=frozenset({"compute"}),
    ),
}
"""By the names that --mode takes. There is a pool where there are store ranks."""


def mode_of(name: str) -> Mode:
    """Return the mode of this name. Raises ConfigError for an unknown one."""
    try:
        return MODES[name]
    except KeyError:
        raise ConfigError(f"mode={name!r}: use {', '.join(MODES)}") from None


def role_counts(name: str, given: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of ranks of each role. Where BY_MODE is given, there are the mode's own instances.

    sizes   ranks of an instance of each role

    Raises ConfigError when a role has ranks that the mode does not have, or too few.
    """
    mode = mode_of(name)
    counts = {
        role: mode.ranks.get(role, 0) * max(1, sizes[role]) if n == BY_MODE else n
        for role, n in given.items()
    }
    for role, count in counts.items():
        if role not in mode.ranks:
            if count:
                raise ConfigError(f"mode={name} has no {role} ranks; {_instead(name, mode, role)}")
        elif count < (role not in mode.optional):
            least = "0 or more" if role in mode.optional else "at least 1 is needed"
            raise ConfigError(f"{role}={count}: {least} in mode={name}")
    return counts


def _instead(name: str, mode: Mode, role: str) -> str:
    """Tell what to write in place of a role that the mode does not have."""
    if role not in COMPUTE_ROLES:
        others = " or ".join(f"--mode {other}" for other, one in MODES.items() if role in one.ranks)
        return f"leave --{role} out, or use {others}"
    return "use " + " and ".join(f"--{other} N" for other in mode.ranks if other in COMPUTE_ROLES)


POOL_OPTIONS = (
    "pool_bytes",
    "ssd_dir",
    "ssd_bytes",
    "eviction",
    "copy_cold_s",
    "kv_events_config",
    "preemption",
)
"""Options that say something about the pool, and nothing without one."""


def refuse_without_pool(name: str, changed: Mapping[str, object]) -> None:
    """Raise ConfigError when options are set that have no effect in a cluster without store ranks.

    changed   options that differ from their defaults, and their values
    """
    mode = mode_of(name)
    idle = {*POOL_OPTIONS, *(("kv_codec", "lend_bytes") if mode.handover == "none" else ())}
    for option, value in changed.items():
        if option in idle:
            flag = "--" + option.replace("_", "-")
            why, fix = without_pool(name)
            raise ConfigError(f"{option}={value!r}: {why}; leave {flag} out, or {fix}")


def without_pool(name: str) -> tuple[str, str]:
    """Return why a cluster without store ranks has no pool, and what gives it one."""
    if "store" in mode_of(name).ranks:
        return f"mode={name} without store ranks has no pool", "add --store N"
    return f"mode={name} has no pool", "use --mode pooled"

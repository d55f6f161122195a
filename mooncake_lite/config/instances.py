"""Instances of several ranks: which sizes there can be, and which rank of an instance has which role.

Read by `serve.py` and by the control plane. The first rank of an instance has the role that policies know,
and the planner; the others follow it. Explained in docs/explain/several-ranks.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mooncake_lite.config.modes import mode_of
from mooncake_lite.errors import ConfigError

STAGE, MEMBER = "stage", "member"
FOLLOWERS = (STAGE, MEMBER)
"""Roles of ranks that follow the first one of their instance. A stage has some of the layers, and works on
other chunks than the stages beside it; a member has a part of each layer, or of each context, and works in
lockstep with all."""


Config = Any
"""A ServeConfig, whose file imports this one."""


def members_of(config: Config, role: str) -> int:
    """Return how many ranks compute in lockstep in an instance whose first rank has this role."""
    return tensor_size(config, role) * context_size(config, role)


def context_size(config: Config, role: str) -> int:
    """Return how many ranks have the KV of each sequence together."""
    return int(config.decode_context_parallel_size) if role == "decode" else 1


def tensor_size(config: Config, role: str) -> int:
    """Return how many ranks have the heads of each layer together."""
    if role not in ("prefill", "decode", "compute"):
        return 1
    own: int = getattr(config, f"{role}_tensor_parallel_size", 0)
    return own or int(config.tensor_parallel_size)


def ranks_of_instance(config: Config, role: str) -> list[str]:
    """Return the roles of the ranks of an instance whose first rank has this role."""
    if role == "prefill" and config.pipeline_parallel_size > 1:
        return [role, *[STAGE] * (config.pipeline_parallel_size - 1)]
    return [role, *[MEMBER] * (members_of(config, role) - 1)]


def instance_of(roles: Sequence[str], rank: int) -> list[int]:
    """Return the ranks of a rank's instance, the one that policies know first: most are alone."""
    first = rank
    while roles[first] in FOLLOWERS:
        first -= 1
    following = itertools.takewhile(lambda other: roles[other] in FOLLOWERS, range(first + 1, len(roles)))
    return [first, *following]


def leading_roles(roles: Sequence[str]) -> list[str]:
    """Return the role of the first rank of each rank's instance."""
    return [roles[instance_of(roles, rank)[0]] for rank in range(len(roles))]


def check_instances(config: Config) -> None:
    """Raises ConfigError for instances that the ranks cannot form, or that could not work."""
    roles = mode_of(config.mode).ranks
    stages = config.pipeline_parallel_size
    if stages != 1:
        named = f"pipeline_parallel_size={stages}"
        if "prefill" not in roles:
            raise ConfigError(f"{named}: mode={config.mode} has no prefill ranks; use --mode pooled or split")
        _check_divides(named, stages, "prefill", config.prefill)
        if not config.enable_chunked_prefill:
            raise ConfigError(
                f"{named} needs chunks, on which its ranks work at once; enable_chunked_prefill"
            )
        if config.layerwise == "on":
            raise ConfigError(f"{named} moves whole blocks; use layerwise=auto")
    for role in ("prefill", "decode"):
        if (size := getattr(config, f"{role}_tensor_parallel_size")) and role not in roles:
            named = f"{role}_tensor_parallel_size={size}"
            raise ConfigError(
                f"{named}: mode={config.mode} has no {role} ranks; use tensor_parallel_size={size}"
            )
    _check_context(config)
    for role in roles:
        size = tensor_size(config, role)
        if size == 1:
            continue
        own = getattr(config, f"{role}_tensor_parallel_size", 0)
        named = f"{f'{role}_' if own else ''}tensor_parallel_size={size}"
        if role == "prefill" and stages > 1:
            raise ConfigError(
                f"{named} and pipeline_parallel_size={stages}: ranks share layers, or parts of each; "
                "leave one of them out"
            )
        _check_divides(named, size, role, getattr(config, role))
        if config.layerwise == "on" and role != "decode":
            raise ConfigError(f"{named} moves whole blocks; use layerwise=auto")


def _check_context(config: Config) -> None:
    """Raises ConfigError for decode ranks that cannot share contexts."""
    turns = context_size(config, "decode")
    if turns == 1:
        return
    named = f"decode_context_parallel_size={turns}"
    if config.mode == "colocated":
        raise ConfigError(f"{named}: its ranks compute no prompts; use --mode pooled or split")
    if (size := tensor_size(config, "decode")) > 1:
        raise ConfigError(
            f"{named} and tensor parallel decode ranks ({size}): ranks share tokens, or heads; leave one of "
            "them out"
        )
    if config.device != "cpu":
        raise ConfigError(f"{named} needs device cpu, not {config.device}")
    _check_divides(named, turns, "decode", config.decode)


def _check_divides(named: str, size: int, role: str, count: int) -> None:
    """Raises ConfigError for a number of ranks that instances of this size cannot have."""
    if size < 1 or count % size:
        sizes = [str(one) for one in range(1, count + 1) if count % one == 0]
        raise ConfigError(f"{named} does not divide {role}={count}: use {' or '.join(sizes)}")

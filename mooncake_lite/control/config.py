"""The configuration of a control plane. Part of the header of every recording."""

from __future__ import annotations

from typing import Literal

import msgspec

from mooncake_lite.config.instances import instance_of
from mooncake_lite.config.modes import MODES, Handover
from mooncake_lite.control.events import RankLost
from scheduler.admission import DEFAULT as ADMISSION
from scheduler.classes import DEFAULT_CLASSES, ServiceClass
from scheduler.costs import CostConfig
from scheduler.hot_spots import TIMES
from scheduler.placement import THRESHOLD, policy_of
from scheduler.placement.contract import Policy
from scheduler.queues import AGEING, TRUST
from store.layout import BlockLayout


class ControlConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, members and policies of one cluster.

    layout        arguments of BlockLayout: layers, kv_heads, block_tokens, head_dim, itemsize, codec
    roles         of each rank: "steward" (rank 0), one of modes.ROLES, or of instances.FOLLOWERS
    nodes         node number of each rank
    racks         rack of each node; empty: every node is a rack of its own
    eviction      name of the policy that evicts blocks from the pool's DRAM, from store.policies
    copy_cold_s   a copy of a hot block that was not read for this long is evicted first
    site_copies   which blocks a rack gets a copy of: none, those that it reads from another one (pull), or
                  those that are read anywhere (push)
    copy_reads    reads within a minute after which such a block is copied
    max_queue     requests that may wait; further ones are refused
    policy        name of the placement policy, from scheduler.placement
    balancing_threshold   how many times longer than the near prefix the longest one must be to be fetched,
                  and to be copied, for the policy kvcache-centric
    far_tokens    for the policy topology: tokens to compute from which racks that decode nothing prefill a
                  prompt; below 0: where it ends first
    admission     name of the form of admission, from scheduler.admission
    queue         name of the order in which waiting requests begin, from scheduler.queues
    queue_ageing  seconds of prefill that a second of waiting is worth, for the queue aged-srpt
    trust         part of the decode slots that go by predicted length, for the queue predicted
    saves         store ranks have an SSD tier
    mode          name of the mode, from modes.MODES
    costs         of prefill, decode, transfers and loads, from a profile; by default a guess
    survives      the cluster goes on without a rank that is lost after it was ready
    term          how many conductors the cluster had before this one; lost: ranks that are lost already
    verify        readers compare every block in DRAM with its checksums
    prefetches    decode ranks load the blocks of a prompt while the rest of it is computed
    wait_for_rank_s   how long requests wait when no rank is left with a duty that they need
    classes       service classes, the highest first; at least one, see scheduler.classes.check_classes
    """

    layout: tuple[int, int, int, int, int, str]
    roles: list[str]
    nodes: list[int]
    racks: list[int] = []
    eviction: str = "lru"
    copy_cold_s: float = 60.0
    site_copies: Literal["none", "pull", "push"] = "none"
    copy_reads: int = TIMES
    max_queue: int = 64
    policy: str = "kvcache-centric"
    balancing_threshold: float = THRESHOLD
    far_tokens: int = -1
    admission: str = ADMISSION
    queue: str = "fcfs"
    queue_ageing: float = AGEING
    trust: float = TRUST
    saves: bool = False
    mode: str = "pooled"
    survives: bool = True
    term: int = 0
    lost: list[RankLost] = []
    verify: bool = False
    prefetches: bool = False
    wait_for_rank_s: float = 30.0
    costs: CostConfig = CostConfig()
    classes: list[ServiceClass] = msgspec.field(default_factory=lambda: list(DEFAULT_CLASSES))

    @property
    def block_layout(self) -> BlockLayout:
        """Return the layout of one block. Raises LayoutError for impossible sizes."""
        return BlockLayout(*self.layout)

    @property
    def placement(self) -> Policy:
        """Return the placement policy."""
        return policy_of(self.policy, self.balancing_threshold, self.far_tokens)

    @property
    def handover(self) -> Handover:
        """Return how a prompt's KV comes to the instance that decodes."""
        return MODES[self.mode].handover

    @property
    def has_pool(self) -> bool:
        """Tell whether there are store ranks, and with them a pool that keeps blocks for later requests."""
        return "store" in self.roles

    @property
    def cache_shares(self) -> list[float]:
        """Return the share of each class in the DRAM of a segment, the highest class first."""
        return [service.cache_share for service in self.classes]

    def instance_of(self, rank: int) -> list[int]:
        """Return the ranks of a rank's instance, which die together, the one that policies know first."""
        return instance_of(self.roles, rank)

    def ranks_of(self, role: str) -> list[int]:
        """Return the ranks that play a role, ascending."""
        return [rank for rank, played in enumerate(self.roles) if played == role]

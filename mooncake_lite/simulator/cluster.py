"""A cluster to simulate: its machines, how they serve, and the limits on latency.

Played by `play.py`. The control plane and the ranks are the live ones; machines are those of a profile.
Explained in docs/explain/simulator.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from math import gcd, inf
from random import Random
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from mooncake_lite.config.instances import (
    MEMBER,
    check_instances,
    context_size,
    ranks_of_instance,
    tensor_size,
)
from mooncake_lite.config.modes import MODES, ROLES
from mooncake_lite.control import ControlConfig
from mooncake_lite.engine.emulated import chance
from mooncake_lite.errors import ConfigError
from mooncake_lite.model.shares import PIECE_TOKENS
from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.profiles.costs import costs_of, covered, pass_seconds, seconds_together
from mooncake_lite.profiles.file import MovesSection, OverheadsSection, Profile
from mooncake_lite.ranks.computing.build import least_by_layers
from mooncake_lite.simulator.profiled import ProfiledHardware, Sites
from mooncake_lite.simulator.setting import Setting
from mooncake_lite.simulator.shapes import Shape
from mooncake_lite.simulator.workload import Source, mixed
from scheduler.classes import ServiceClass
from scheduler.costs import CostConfig
from scheduler.instance.foreseen import Foreseen
from scheduler.instance.task import NewDrafter
from store.allocator import padded_size
from store.layout import BlockLayout
from store.policies import policy_factory

NO_SIZES = {
    "tensor_parallel_size": 1, "prefill_tensor_parallel_size": 0, "decode_tensor_parallel_size": 0,
    "decode_context_parallel_size": 1,
}  # fmt: skip
"""Options of serve about the ranks of an instance, and what they are when nobody gives them."""

MOST_NODES = 4_096
LEAST_PAGE = 16
"""Tokens of a page. Pages of long blocks are whole blocks: fewer of them are counted in the same time."""

LETTERS = {"P": "prefill", "D": "decode", "C": "compute", "S": "store"}


ROWS, CONTEXT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), 2048
"""Rows of passes, and tokens that each row attends to. Their costs decide how many drafts there are."""


def parse_nodes(words: str) -> dict[str, int]:
    """Return the nodes of each role, of words like 8P8D, 16C or 4P4D2S. Raises ConfigError."""
    found = {letter: int(count) for count, letter in re.findall(r"(\d{1,6})([PDCS])", words)}
    if "".join(f"{count}{letter}" for letter, count in found.items()) != words or 0 in found.values():
        raise ConfigError(f"--nodes {words!r}: write how many nodes prefill and decode, as 8P8D, or 16C")
    if sum(found.values()) > MOST_NODES:
        raise ConfigError(f"--nodes {words}: at most {MOST_NODES:,} nodes")
    if set(found) - {"S"} not in ({"P", "D"}, {"C"}):
        raise ConfigError(f"--nodes {words}: name nodes that prefill and nodes that decode, or nC for both")
    return {LETTERS[letter]: count for letter, count in found.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """One cluster.

    profile      of its machines, from which the control plane knows costs
    machines     what they are, where that differs from the profile
    nodes        nodes by the role of their computing rank; store: stores of the pool, left out: one on each
                 node that prefills
    together     all ranks are on one node, as on a laptop
    mode         of the cluster, from modes.MODES
    block_tokens of a block of the pool
    node_bytes   DRAM that a store lends to the pool; in mode split, that a node lends which decodes
    ssd_bytes    of the tier of each such node; 0: there is none
    kv_bytes     KV pages of a computing rank
    link_bytes_per_s, ssd_bytes_per_s   of a node's link, in each direction, and of its disk; None: what the
                 profile measured
    batched_tokens     of a forward pass beside the running batch; 0: each prompt is one pass
    sequences    that a rank decodes at once
    overlaps     prompts are computed while others are stored
    layerwise    prefixes come in, and the last blocks leave, by layers beside a pass: on, off, or auto: where
                 the costs say that it is faster
    sharing      how computing ranks reuse their own pages; off: all reuse goes through the pool
    ttft_s, tbt_s   limits that goodput counts
    acceptance   probability that a draft after right ones is right; 0: there are no drafts
    margin       factor on these limits for admission, so that a small error makes no request late
    sizes        ranks of an instance, as serve's options name them; each has a node of its own. Left out: 1
    eviction     policy that evicts blocks from the pool's DRAM
    control      further fields of the control plane's configuration, by name
    racks        site of each node; empty: there is one site. Only the policy topology is told
    site_bytes_per_s, site_s   of the uplink of a site, each way; from site to site, one way
    """

    profile: Profile
    nodes: Mapping[str, int]
    machines: Profile | None = None
    together: bool = False
    mode: str = "pooled"
    block_tokens: int = 512
    node_bytes: int = 10**12
    ssd_bytes: int = 0
    kv_bytes: int = 320 * 2**30
    link_bytes_per_s: float | None = None
    ssd_bytes_per_s: float | None = None
    batched_tokens: int = 0
    sequences: int = 1_000_000
    overlaps: bool = True
    layerwise: str = "auto"
    sharing: str = "off"
    policy: str = "kvcache-centric"
    admission: str = "none"
    queue: str = "fcfs"
    ttft_s: float = 30.0
    tbt_s: float = 0.1
    acceptance: float = 0.0
    margin: float = 1.0
    sizes: Mapping[str, int] = field(default_factory=dict)
    eviction: str = "lru"
    control: Mapping[str, Any] = field(default_factory=dict)
    racks: Sequence[int] = ()
    site_bytes_per_s: float = inf
    site_s: float = 0.0

    def __post_init__(self) -> None:
        mode = MODES[self.mode]
        wanted = {role for role in mode.ranks if role != "store"}
        if wanted != set(self.nodes) - {"store"}:
            letters = {role: letter for letter, role in LETTERS.items()}
            form = "".join(f"n{letters[role]}" for role in ROLES if role in wanted)
            raise ConfigError(f"mode {self.mode} has nodes of the form {form}")
        if not self.profile.model.kv:
            raise ConfigError(
                f"the profile of {self.profile.model.name} does not say how large its KV is; "
                "measure it anew with `mooncake-lite profile`"
            )
        check_instances(self._instances)
        members = max(tensor_size(self._instances, role) for role in self.nodes)
        if members > (heads := self.layout.kv_heads):
            raise ConfigError(f"tensor parallel size {members}: at most {heads}, one for each key/value head")
        if "store" in self.nodes and (self.mode == "split" or not self.node_blocks):
            raise ConfigError(f"mode {self.mode} has stores only with --node-dram, and mode split has none")
        if self.ssd_bytes and (self.mode == "split" or not self.node_blocks):
            raise ConfigError("--ssd: this cluster has no stores, and so no tiers")
        if 0 < self.ssd_bytes < self.layout.nbytes:
            raise ConfigError(f"--ssd {self.ssd_bytes}: a block has {self.layout.nbytes:,} bytes")
        if self.layerwise == "on" and not self.overlaps:
            raise ConfigError("--no-overlap-transfers moves whole blocks; use --layerwise auto")
        if self.together and self.link_bytes_per_s is not None:
            raise ConfigError("--one-node has no links between nodes: leave out --link-gbps")
        if self.kv_bytes < self.layout.nbytes:
            raise ConfigError(f"--kv-cache-bytes {self.kv_bytes}: a block has {self.layout.nbytes:,} bytes")
        try:
            policy_factory(self.eviction)
        except ValueError as error:
            raise ConfigError(f"--eviction: {error}") from None
        if self.mode == "pooled" and self.node_blocks < 1:
            raise ConfigError(f"--node-dram {self.node_bytes}: a block has {self.layout.nbytes:,} bytes")

    @property
    def _instances(self) -> Any:
        """Return what `config.instances` reads of a configuration."""
        return SimpleNamespace(
            pipeline_parallel_size=1, device="cpu", mode=self.mode, layerwise=self.layerwise,
            **dict.fromkeys(ROLES, 0) | dict(self.nodes) | NO_SIZES | dict(self.sizes),
        )  # fmt: skip

    @property
    def _turns(self) -> int:
        return context_size(self._instances, "decode")

    @property
    def layout(self) -> BlockLayout:
        """Return the layout of a block."""
        layers, kv_heads, head_dim, itemsize = self.profile.model.kv
        return BlockLayout(layers, kv_heads, self.block_tokens, head_dim, itemsize)

    @property
    def node_blocks(self) -> int:
        """Return the blocks that a node lends."""
        return self.node_bytes // padded_size(self.layout.nbytes)

    @property
    def costs(self) -> CostConfig:
        """Return the costs with which the control plane starts: those of the machines."""
        costs = costs_of(self.profile)
        if self.link_bytes_per_s is not None:
            costs = replace(costs, transfer=replace(costs.transfer, far_bytes_per_s=self.link_bytes_per_s))
        if self.ssd_bytes_per_s is not None:
            costs = replace(costs, load=replace(costs.load, ssd_bytes_per_s=self.ssd_bytes_per_s))
        return costs

    @property
    def _told_costs(self) -> CostConfig:
        """Return the costs for a policy that knows sites: a node has its share of the uplink between them."""
        costs, link = self.costs, self.costs.transfer.far_bytes_per_s
        share = self.site_bytes_per_s / max(Counter(self.racks).values(), default=1)
        transfer = replace(costs.transfer, far_bytes_per_s=min(link, share), rack_bytes_per_s=link)
        return replace(costs, transfer=transfer) if self.racks else costs

    @property
    def guesses(self) -> dict[str, float]:
        """Return the rates that this cluster uses and its profile lacks, in bytes per second, by name."""
        known, costs = self.profile.moves or MovesSection(), self.costs
        if self.mode == "colocated" and not self.node_blocks:
            return {}  # no KV moves
        disk = not self.ssd_bytes or self.ssd_bytes_per_s or known.ssd_bytes_per_s
        link = self.together or self.link_bytes_per_s or known.far_bytes_per_s
        rates = [
            ("disks", disk, costs.load.ssd_bytes_per_s),
            ("copies within a host", known.dram_bytes_per_s, costs.load.dram_bytes_per_s),
            ("links", link, costs.transfer.far_bytes_per_s),
        ]
        return {name: rate for name, is_known, rate in rates if not is_known}

    @property
    def overheads(self) -> OverheadsSection:
        """Return what the profile has measured besides passes and moves, or a guess."""
        return (self.machines or self.profile).overheads or OverheadsSection()

    @property
    def counts(self) -> Counter[str]:
        """Return the ranks by role, the steward and the stores among them."""
        return Counter(self._ranks()[0])

    def setting(self, source: Source, seed: int) -> Setting:
        """Return a run: the requests of a source on this cluster."""
        roles, nodes = self._ranks()
        lenders = {"store"} if "store" in roles else MODES[self.mode].lenders - {"compute"}
        machines = self.machines or self.profile
        size = self.block_tokens
        page_tokens = size if size > 4 * LEAST_PAGE else gcd(size, LEAST_PAGE)
        nbytes, load, pass_s = self.layout.nbytes, self.costs.load, pass_seconds(machines)
        shape = Shape(
            config=self._config(roles, nodes, source.num_requests),
            segments=[self.node_blocks * (role in lenders) for role in roles],
            slots=self.sequences, prompts=1,
            pages=self.kv_bytes * self.block_tokens // (nbytes * page_tokens),
            page_tokens=page_tokens, budget=self.batched_tokens or 1 << 30, chunked=bool(self.batched_tokens),
            overlaps=self.overlaps, by_layers=self.overlaps and self.layerwise != "off",
            least=least_by_layers(self.layout.layers, nbytes, load) if self.layerwise == "auto" else 1,
            half_blocks=self.kv_bytes // nbytes,
            sharing=self.sharing, tier_blocks=self.ssd_bytes // nbytes if "store" in roles else 0,
            new_drafter=self._new_drafter,
            row_costs=tuple((rows, pass_s(PassLoad(0, 0, rows, rows * CONTEXT))) for rows in ROWS),
            turns=self._turns, unit_tokens=max(PIECE_TOKENS, size),
        )  # fmt: skip
        together = {
            rank: seconds_together(
                pass_s, machines.exchange, self.layout.layers, tensor_size(self._instances, role),
                shape.turns_of(rank),
            )
            for rank, role in enumerate(roles) if shape.in_lockstep(rank) and role != MEMBER
        }  # fmt: skip
        sites = Sites(self.racks, self.site_bytes_per_s, self.site_s)
        return Setting(
            shape=shape,
            hardware=lambda clock: ProfiledHardware(
                clock, pass_s, self.costs, nodes, self.overheads, covered(machines), together, sites
            ),
            source=source,
            dice=Random(mixed(seed, 5)),
        )

    @property
    def _new_drafter(self) -> NewDrafter | None:
        """Return what makes drafts of the only token that simulated ranks draw."""
        if not self.acceptance:
            return None
        return lambda job, branch: Foreseen(job, self.acceptance, lambda sequence, drafts: 0, chance)

    def _ranks(self) -> tuple[list[str], list[int]]:
        """Return role and node of each rank: a steward, stores, and a computing rank on each node."""
        computing, lenders = list[str](), list[int]()
        for role in (role for role in ROLES if role != "store"):
            instance = ranks_of_instance(self._instances, role)
            count, first = self.nodes.get(role, 0), len(computing)
            computing += instance * (count // len(instance))
            lenders += range(first, first + count) if role != "decode" else ()
        count = self.nodes.get("store", len(lenders))
        stores = [lenders[number % len(lenders)] for number in range(count)]
        if self.mode == "split" or not self.node_blocks:
            stores = []
        roles = ["steward", *computing, *["store"] * len(stores)]
        return roles, [0] * len(roles) if self.together else [0, *range(len(computing)), *stores]

    def _config(self, roles: list[str], nodes: list[int], requests: int) -> ControlConfig:
        limits = (inf, inf) if self.admission == "none" else (self.ttft_s, self.tbt_s)
        ttft_s, tbt_s = (self.margin * limit for limit in limits)
        racks, costs = (list(self.racks), self._told_costs) if self.policy == "topology" else ([], self.costs)
        made = ControlConfig(
            layout=astuple(self.layout), roles=roles, nodes=nodes, max_queue=requests, mode=self.mode,
            policy=self.policy, admission=self.admission, queue=self.queue, costs=costs, racks=racks,
            eviction=self.eviction, saves=self.ssd_bytes > 0 and "store" in roles,
            prefetches=self.overlaps and self.mode == "pooled" and self._turns == 1,
            classes=[ServiceClass(name="standard", slo_ttft_s=ttft_s, slo_tbt_s=tbt_s)],
        )  # fmt: skip
        return replace(made, **self.control)

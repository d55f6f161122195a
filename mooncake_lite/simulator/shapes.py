"""Clusters to model: which ranks there are, on which nodes, and what they lend.

Used by `world.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import inf
from random import Random

from msgspec.structs import replace

from mooncake_lite.conductor.machine import Facts
from mooncake_lite.config.modes import DUTIES, MODES, ROLES
from mooncake_lite.control import ControlConfig
from mooncake_lite.messages import RankHello
from scheduler.admission import ADMISSIONS
from scheduler.classes import DEFAULT_CLASSES
from scheduler.instance import Limits, Pages, Preemption, Staging, State, new_prefix_cache
from scheduler.instance.state import NextKey
from scheduler.placement import POLICIES
from scheduler.queues import QUEUES
from store.allocator import padded_size
from store.layout import BlockLayout

EVICTIONS = ("lru", "lru", "lfu", "s3fifo", "arc", "lru+second-hit")

MODES_DRAWN = ("pooled", "pooled", "pooled", "split", "colocated", "colocated")

SHARES_DRAWN = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.5, 0.0, 0.0), (0.3, 0.3, 0.4))
"""Shares of DRAM that the service classes have, the highest class first."""

TTFT_LIMITS_S = (inf, inf, 20.0, 4.0, 0.5)

TBT_LIMITS_S = (inf, inf, 0.0205, 0.02)
"""A modelled step takes 20 ms. The costs learn that, and they expect some more from each sequence."""

PROMPT_BLOCKS, ANSWER_BLOCKS = 12, 4
"""Blocks of the longest prompt that a rank gets in a run with faults, and of the longest answer."""

IN_STAGES = 0.2
"""Share of clusters whose prefill instances are pipelines, where they have prefill ranks."""

LAYOUT = (2, 1, 16, 4, 4, "none")
"""A block of 16 tokens in two layers: 1 KiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One cluster.

    config      of its control plane; roles and nodes by rank
    segments    blocks that each rank lends, by rank
    slots       requests that one rank decodes at once
    prompts     requests that one prefill rank computes at once
    pages       KV pages of a computing rank; page_tokens: tokens of each
    budget      tokens of a forward pass beside the running batch; chunked: prompts may be cut into chunks
    overlaps    prompts are computed while blocks are stored, and decode ranks load those meanwhile
    by_layers   prefixes come in, and the last blocks leave, layer by layer; least: the fewest blocks that do
    half_blocks, put_slots   staging memory of a computing rank: blocks of each half, and single slots
    sharing     how a rank shares prefixes in its pages
    preemption  what happens to sequences when pages run out
    tier_blocks capacity of the SSD tier of each store rank; 0: there is none
    """

    config: ControlConfig
    segments: list[int]
    slots: int
    prompts: int
    pages: int
    page_tokens: int
    budget: int
    chunked: bool = True
    overlaps: bool = True
    by_layers: bool = True
    least: int = 1
    half_blocks: int = 2
    put_slots: int = 4
    sharing: str = "off"
    preemption: Preemption = "recompute"
    tier_blocks: int = 0

    @classmethod
    def drawn(cls, random: Random) -> Shape:
        """Draw a mode, and up to three ranks of each role on up to three nodes. Most pools are too small."""
        name = random.choice(MODES_DRAWN)
        mode = MODES[name]
        least = {role: int(role not in mode.optional) for role in mode.ranks}
        counts = {role: random.randint(least[role], 3) for role in mode.ranks}
        roles = ["steward", *(role for role in ROLES for _ in range(counts.get(role, 0)))]
        num_nodes = random.randint(1, 3)
        nodes = [0, *(random.randrange(num_nodes) for _ in roles[1:])]
        pool = random.choice((10, 16, 30, 60))
        lent = pool if mode.handover == "direct" else random.choice((0, 0, 4, 12)) * ("store" in roles)
        segments = [pool if role == "store" else lent * (role in mode.lenders) for role in roles]
        tier_blocks = random.choice((0, 12, 60)) * ("store" in roles)
        overlaps = random.random() < 0.8
        forms = [form for form in ADMISSIONS if mode.handover != "none" or not ADMISSIONS[form]().withholds]
        config = ControlConfig(
            layout=LAYOUT,
            roles=roles,
            nodes=nodes,
            eviction=random.choice(EVICTIONS),
            copy_cold_s=random.choice((0.0, 5.0, 60.0)),
            max_queue=random.choice((6, 32, 64)),
            saves=tier_blocks > 0,
            mode=name,
            policy=random.choice(list(POLICIES)),
            queue=random.choice(list(QUEUES)),
            admission=random.choice(forms),
            prefetches=overlaps,
            classes=[
                replace(
                    service, cache_share=share, slo_ttft_s=random.choice(TTFT_LIMITS_S),
                    slo_tbt_s=random.choice(TBT_LIMITS_S),
                )
                for service, share in zip(DEFAULT_CLASSES, random.choice(SHARES_DRAWN))
            ],
        )  # fmt: skip
        shape = cls(
            config=config, segments=segments, slots=random.choice((1, 2, 8)),
            prompts=random.choice((1, 1, 2, 4)), pages=0, page_tokens=random.choice((4, 8, 16)),
            budget=random.choice((8, 64, 512)), chunked=random.random() < 0.7, overlaps=overlaps,
            by_layers=overlaps and random.random() < 0.7,
            half_blocks=random.choice((1, 2, 8)), put_slots=random.choice((1, 2, 6)),
            sharing=random.choice(("off", "hash", "radix")), tier_blocks=tier_blocks,
            preemption="swap" if "store" in roles and random.random() < 0.5 else "recompute",
        )  # fmt: skip
        blocks = PROMPT_BLOCKS + ANSWER_BLOCKS + random.choice((0, 4, 60))
        per_block = shape.layout.block_tokens // shape.page_tokens
        shape = dataclasses.replace(shape, pages=blocks * per_block)
        apart = Random(f"{roles} {nodes} {pool}")  # so that all else is drawn as without pipelines
        return shape.in_stages(apart.choice((2, 3))) if apart.random() < IN_STAGES else shape

    def in_stages(self, count: int) -> Shape:
        """Return the same cluster with a pipeline of `count` ranks in place of each prefill rank."""
        more = [count - 1 if role == "prefill" else 0 for role in self.config.roles]
        roles = [one for role, n in zip(self.config.roles, more) for one in (role, *["stage"] * n)]
        nodes = [node for node, n in zip(self.config.nodes, more) for _ in range(1 + n)]
        segments = [one for size, n in zip(self.segments, more) for one in (size, *[0] * n)]
        config = replace(self.config, roles=roles, nodes=nodes)
        return dataclasses.replace(self, config=config, segments=segments, chunked=True, by_layers=False)

    @property
    def layout(self) -> BlockLayout:
        """Return the sizes of a block."""
        return BlockLayout(*self.config.layout)

    def ranks(self, role: str) -> list[int]:
        """Return all ranks with this role."""
        return [rank for rank, name in enumerate(self.config.roles) if name == role]

    @property
    def at_once(self) -> float:
        """Return how many prompts the cluster computes at once, about.

        A rank of both duties has a request until its answer ends. That takes some four times as long.
        """
        ranks = {role: len(self.ranks(role)) for role in self.config.roles}
        if self.config.handover == "none":
            return ranks["compute"] * self.slots / 4
        return min(ranks["prefill"] * self.prompts, ranks["decode"] * self.slots)

    @property
    def largest_blocks(self) -> int:
        """Return the blocks of the longest prompt that fits; where none is too long, of a long one."""
        if self.config.handover == "none":
            return PROMPT_BLOCKS
        return max(self.segments) if self.config.handover == "direct" else sum(self.segments)

    def rank_state(self, rank: int, next_key: NextKey) -> State:
        """Return the empty books of a computing rank."""
        config, size = self.config, self.layout.block_tokens
        pages = Pages(self.pages, self.page_tokens)
        by_layers = self.layout.layers if self.by_layers else 0
        stages = len(config.instance_of(rank))
        limits = Limits(
            self.budget,
            self.slots,
            self.prompts,
            self.chunked,
            self.overlaps,
            by_layers,
            self.least,
            late=stages > 1,
            even=4 * self.layout.block_tokens * (stages > 1),
        )
        staging, prefix = (
            Staging(self.half_blocks, self.put_slots),
            new_prefix_cache(self.sharing, pages, size),
        )
        return State(
            frozenset(DUTIES[config.roles[rank]]), pages, staging, size, limits, next_key=next_key,
            prefix=prefix, preemption=self.preemption,
        )  # fmt: skip

    def segment_bytes(self, rank: int) -> int:
        """Return the bytes that a rank lends."""
        return self.segments[rank] * padded_size(self.layout.nbytes)

    @property
    def facts(self) -> Facts:
        """Return what the conductor knows of its ranks besides its configuration."""
        return Facts(dict.fromkeys(DUTIES, self.slots) | {"prefill": self.prompts, "store": 0})

    def hello(self, rank: int, epoch: int = 0) -> RankHello:
        """Return what a rank says when it is ready. epoch: number of the conductor."""
        role = self.config.roles[rank]
        has_tier = role == "store" and self.tier_blocks > 0
        return RankHello(rank, role, self.config.nodes[rank], self.segment_bytes(rank), has_tier, epoch)

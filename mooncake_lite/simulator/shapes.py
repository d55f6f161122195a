"""Clusters to model: which ranks there are, on which nodes, and what they lend.

Used by `world.py`. Explained in docs/explain/control.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_lite.config.instances import MEMBER
from mooncake_lite.config.modes import DUTIES
from mooncake_lite.control import ControlConfig
from mooncake_lite.messages import RankHello
from scheduler.instance import Limits, Pages, Preemption, Staging, State, new_prefix_cache
from scheduler.instance.dealt_pages import DealtPages
from scheduler.instance.limits import ROW_COSTS
from scheduler.instance.state import NextKey
from scheduler.instance.task import NewDrafter
from store.allocator import padded_size
from store.layout import BlockLayout


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
    new_drafter makes drafts for sequences that decode; row_costs: of a pass, by which drafts pay
    turns       members of a decode instance that share contexts; unit_tokens: in which they deal them out
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
    new_drafter: NewDrafter | None = None
    row_costs: tuple[tuple[int, float], ...] = ROW_COSTS
    turns: int = 1
    unit_tokens: int = 0

    def in_lockstep(self, rank: int) -> bool:
        """Tell whether a rank is the first of several that compute each pass together."""
        return MEMBER in [self.config.roles[one] for one in self.config.instance_of(rank)]

    def turns_of(self, rank: int) -> int:
        """Return how many ranks share the contexts of an instance, by its first one."""
        return self.turns if self.config.roles[rank] == "decode" else 1

    @property
    def layout(self) -> BlockLayout:
        """Return the sizes of a block."""
        return BlockLayout(*self.config.layout)

    def ranks(self, role: str) -> list[int]:
        """Return all ranks with this role."""
        return [rank for rank, name in enumerate(self.config.roles) if name == role]

    def rank_state(self, rank: int, next_key: NextKey) -> State:
        """Return the empty books of a computing rank."""
        config, size = self.config, self.layout.block_tokens
        ranks, turns, heads = len(config.instance_of(rank)), self.turns_of(rank), self.layout.kv_heads
        stages, parts = (1, ranks // turns) if self.in_lockstep(rank) else (ranks, 1)
        pages = Pages(self.pages * heads // -(-heads // parts), self.page_tokens)
        sharing, new_drafter = self.sharing, self.new_drafter
        if turns > 1:
            pages = DealtPages(self.pages, self.page_tokens, self.unit_tokens, turns)
            sharing, new_drafter = "off", None
        by_layers = self.layout.layers * (self.by_layers and not self.in_lockstep(rank))
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
            row_costs=self.row_costs,
        )
        staging, prefix = (
            Staging(self.half_blocks, self.put_slots),
            new_prefix_cache(sharing, pages, size),
        )
        return State(
            frozenset(DUTIES[config.roles[rank]]), pages, staging, size, limits, next_key=next_key,
            prefix=prefix, preemption=self.preemption, new_drafter=new_drafter,
        )  # fmt: skip

    def segment_bytes(self, rank: int) -> int:
        """Return the bytes that a rank lends."""
        return self.segments[rank] * padded_size(self.layout.nbytes)

    def hello(self, rank: int, epoch: int = 0) -> RankHello:
        """Return what a rank says when it is ready. epoch: number of the conductor."""
        role = self.config.roles[rank]
        has_tier = role == "store" and self.tier_blocks > 0
        return RankHello(rank, role, self.config.nodes[rank], self.segment_bytes(rank), has_tier, epoch)

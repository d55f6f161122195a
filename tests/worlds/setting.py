"""What a run of the fault world is about: cluster, hardware and requests are drawn with a seed.

    SHARES_DRAWN    of DRAM that the service classes have, the highest class first
    TBT_LIMITS_S    a modelled step takes 20 ms. The costs learn that, and expect some more from each sequence
    PROMPT_BLOCKS   of the longest prompt that a rank gets, ANSWER_BLOCKS of the longest answer
    IN_STAGES       share of clusters whose prefill instances are pipelines, where they have prefill ranks
    IN_MEMBERS      share of the other clusters with instances whose ranks work in lockstep
    DRAFTING        share of clusters whose decoding ranks make drafts; ACCEPTANCES: parts that are accepted
    FLAT            rows cost next to nothing, so that drafts are made whatever becomes of them
    LAYOUT          a block of 16 tokens in two layers of four heads: 1 KiB
    GAPS_S          mean times between requests, for each prompt that the cluster computes at once

Explained in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from random import Random

from msgspec.structs import replace as changed

from mooncake_lite.config.instances import FOLLOWERS, MEMBER, STAGE
from mooncake_lite.config.modes import MODES, ROLES
from mooncake_lite.control import ControlConfig
from mooncake_lite.engine.emulated import emulated_drafter
from mooncake_lite.simulator.hardware import DrawnHardware
from mooncake_lite.simulator.setting import Setting
from mooncake_lite.simulator.shapes import Shape
from scheduler.admission import ADMISSIONS
from scheduler.classes import DEFAULT_CLASSES
from scheduler.placement import POLICIES
from scheduler.queues import QUEUES
from tests.worlds.faults import Faults, Poison
from tests.worlds.members import UNIT_TOKENS
from tests.worlds.requests import VOCABULARY, Workload

EVICTIONS = ("lru", "lru", "lfu", "s3fifo", "arc", "lru+second-hit")
MODES_DRAWN = ("pooled", "pooled", "pooled", "split", "colocated", "colocated")
SHARES_DRAWN = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.5, 0.0, 0.0), (0.3, 0.3, 0.4))
TTFT_LIMITS_S, TBT_LIMITS_S = (inf, inf, 20.0, 4.0, 0.5), (inf, inf, 0.0205, 0.02)
PROMPT_BLOCKS, ANSWER_BLOCKS, IN_STAGES, IN_MEMBERS = 12, 4, 0.2, 0.23
DRAFTING, ACCEPTANCES, FLAT = 0.2, (0.3, 0.7, 0.95), ((1, 1.0), (32, 1.01))
LAYOUT = (2, 4, 16, 1, 4, "none")
GAPS_S = (0.1, 0.4, 0.8, 2.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSetting(Setting):
    """One run.

    seed          is named when the run fails
    dice          decides about faults, client_dice about what clients do
    """

    seed: int
    faults: Faults
    client_dice: Random

    @classmethod
    def drawn(cls, seed: int, num_requests: int = 100, faults: Faults | None = None) -> DrawnSetting:
        """Draw everything. faults: how often things go wrong where they do; None: often."""
        random = Random(seed)
        shape = drawn_shape(random)
        drawn = (faults or Faults()).drawn(random)
        shape = replace(shape, config=changed(shape.config, verify=drawn.flipped > 0))
        dice, of_requests, client_dice = (Random(random.getrandbits(64)) for _ in range(3))
        gap_s = client_dice.choice(GAPS_S) / at_once(shape)
        size = shape.layout.block_tokens
        apart = Random(f"poison {seed}")  # so that all else is drawn as without poison
        poison = partial(Poison.drawn, apart, not {*FOLLOWERS} & {*shape.config.roles})
        return cls(
            seed=seed, shape=shape, faults=drawn, dice=dice, client_dice=client_dice,
            hardware=lambda clock: DrawnHardware(clock, dice),
            source=Workload(
                of_requests, num_requests, gap_s, size, largest_blocks(shape) * size,
                too_large=shape.config.handover != "none",
                poison=poison if apart.random() < drawn.poisoned else None,
            ),
        )  # fmt: skip


def drawn_shape(random: Random) -> Shape:
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
        layout=LAYOUT, roles=roles, nodes=nodes, eviction=random.choice(EVICTIONS),
        copy_cold_s=random.choice((0.0, 5.0, 60.0)), max_queue=random.choice((6, 32, 64)),
        saves=tier_blocks > 0, mode=name, policy=random.choice(list(POLICIES)),
        queue=random.choice(list(QUEUES)), admission=random.choice(forms), prefetches=overlaps,
        classes=[
            changed(service, cache_share=share, slo_ttft_s=random.choice(TTFT_LIMITS_S),
                    slo_tbt_s=random.choice(TBT_LIMITS_S))
            for service, share in zip(DEFAULT_CLASSES, random.choice(SHARES_DRAWN))
        ],
    )  # fmt: skip
    racked = Random(f"racks {roles} {nodes} {pool}")
    if config.policy == "topology":
        config = changed(
            config, racks=racked.choice(([0, 1, 2], [0, 0, 1]))[:num_nodes], copy_reads=racked.randint(1, 2),
            site_copies=racked.choice(("none", "pull", "push")), far_tokens=racked.choice((-1, 32)),
        )  # fmt: skip
    shape = Shape(
        config=config, segments=segments, slots=random.choice((1, 2, 8)),
        prompts=random.choice((1, 1, 2, 4)), pages=0, page_tokens=random.choice((4, 8, 16)),
        budget=random.choice((8, 64, 512)), chunked=random.random() < 0.7, overlaps=overlaps,
        by_layers=overlaps and random.random() < 0.7,
        half_blocks=random.choice((1, 2, 8)), put_slots=random.choice((1, 2, 6)),
        sharing=random.choice(("off", "hash", "radix")), tier_blocks=tier_blocks,
        preemption="swap" if "store" in roles and random.random() < 0.5 else "recompute",
    )  # fmt: skip
    blocks = PROMPT_BLOCKS + ANSWER_BLOCKS + random.choice((0, 4, 60))
    shape = replace(shape, pages=blocks * shape.layout.block_tokens // shape.page_tokens)
    drafts = Random(f"drafts {roles} {nodes} {pool}")
    if drafts.random() < DRAFTING:
        new_drafter = emulated_drafter(drafts.choice(ACCEPTANCES), VOCABULARY)
        shape = replace(shape, new_drafter=new_drafter, row_costs=FLAT)
    apart = Random(f"{roles} {nodes} {pool}")  # so that all else is drawn as without pipelines
    if apart.random() < IN_STAGES and "prefill" in roles:
        staged = with_more(shape, {"prefill": apart.choice((2, 3))}, STAGE)
        return replace(staged, chunked=True, by_layers=False)
    return in_members(shape, apart) if apart.random() < IN_MEMBERS else shape


def in_members(shape: Shape, random: Random) -> Shape:
    """Draw which of its ranks become instances whose ranks work in lockstep."""
    if "compute" in shape.config.roles:
        return with_more(shape, {"compute": random.choice((2, 3))}, MEMBER)
    prefill, decode, context = random.choice(
        ((2, 1, 1), (3, 1, 1), (1, 2, 1), (1, 3, 1), (2, 3, 1), (3, 2, 1), (1, 1, 2), (1, 1, 3), (2, 1, 2))
    )
    together = with_more(shape, {"prefill": prefill, "decode": decode * context}, MEMBER)
    return replace(together, turns=context, unit_tokens=random.choice(UNIT_TOKENS))


def with_more(shape: Shape, sizes: Mapping[str, int], follower: str) -> Shape:
    """Return a cluster with instances of several ranks, all on the node of the first one.

    sizes   ranks in place of each rank of a role
    """
    more = [sizes.get(role, 1) - 1 for role in shape.config.roles]
    roles = [one for role, n in zip(shape.config.roles, more) for one in (role, *[follower] * n)]
    nodes = [node for node, n in zip(shape.config.nodes, more) for _ in range(1 + n)]
    segments = [one for size, n in zip(shape.segments, more) for one in (size, *[0] * n)]
    return replace(shape, config=changed(shape.config, roles=roles, nodes=nodes), segments=segments)


def at_once(shape: Shape) -> float:
    """Return how many prompts the cluster computes at once, about.

    A rank of both duties has a request until its answer ends. That takes some four times as long.
    """
    ranks = {role: len(shape.ranks(role)) for role in shape.config.roles}
    if shape.config.handover == "none":
        return ranks["compute"] * shape.slots / 4
    return min(ranks["prefill"] * shape.prompts, ranks["decode"] * shape.slots)


def largest_blocks(shape: Shape) -> int:
    """Return the blocks of the longest prompt that fits; where none is too long, of a long one."""
    if shape.config.handover == "none":
        return PROMPT_BLOCKS
    return max(shape.segments) if shape.config.handover == "direct" else sum(shape.segments)

"""Builds the machine of a computing rank from a cluster's configuration.

Used by ranks of a cluster, and by `mooncake_lite.llm` for its only rank.
"""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

from mooncake_lite.config.instances import context_size, members_of
from mooncake_lite.config.serve import PAGE_TOKENS, ServeConfig, acceptance_of
from mooncake_lite.engine.by_layers import GROUPS
from mooncake_lite.engine.emulated import emulated_drafter
from mooncake_lite.messages import RankHello
from mooncake_lite.model.config import ModelConfig
from mooncake_lite.model.sizes import block_layout, context_length, unit_tokens
from mooncake_lite.ranks.computing.machine import ComputingRank
from scheduler.costs import CostConfig, LoadCost
from scheduler.instance import PREFILL, Limits, Pages, Staging, State, new_prefix_cache
from scheduler.instance.dealt_pages import DealtPages
from scheduler.instance.lookup import Lookup
from scheduler.instance.task import NewDrafter
from store.keys import next_key

GUESS, NEVER = CostConfig().load, 1 << 30

GROUP_S = 25e-6
"""What each group of layers costs beside its bytes: one block of the default model, loaded in groups beside
a pass, takes as long as whole and before it."""


def least_by_layers(layers: int, nbytes: int, load: LoadCost) -> int:
    """Return from how many blocks of nbytes bytes on it is faster to move them by layers.

    All but one group's part of the load is hidden behind the pass, and each group has a cost of its own.
    """
    groups = min(GROUPS, layers)
    hidden_s = (1 - 1 / groups) * load.seconds("dram", nbytes)
    return ceil(groups * GROUP_S / hidden_s) if hidden_s else NEVER


def limits_of(config: ServeConfig, model: ModelConfig, prefills: bool, load: LoadCost = GUESS) -> Limits:
    """Return how much a rank that computes does at once. prefills: it decodes nothing."""
    in_stages = prefills and config.pipeline_parallel_size > 1
    role = "prefill" if prefills else "decode" if config.decode else "compute"
    alone = not in_stages and members_of(config, role) == 1
    by_layers = config.overlap_transfers and config.layerwise != "off" and alone
    nbytes = block_layout(config, model).nbytes
    return Limits(
        config.max_num_batched_tokens,
        config.max_num_seqs,
        config.max_num_partial_prefills,
        config.enable_chunked_prefill,
        config.overlap_transfers,
        model.layers if by_layers else 0,
        least_by_layers(model.layers, nbytes, load) if config.layerwise == "auto" else 1,
        in_stages,
        even_context(model) if in_stages else 0,
    )


def new_drafter_of(config: ServeConfig, model: ModelConfig) -> NewDrafter | None:
    """Return what makes drafts. Which requests have them is said by their bodies."""
    if config.engine == "real":
        return Lookup
    acceptance = acceptance_of(config.speculate)
    return emulated_drafter(acceptance, model.vocab_size) if acceptance else None


def even_context(model: ModelConfig) -> int:
    """Return the context at which attention takes as many FLOPs as all linear layers of a token."""
    heads, inner = model.heads * model.head_dim, model.intermediate_size
    linear = model.hidden_size * (2 * heads + 2 * model.kv_heads * model.head_dim + 3 * inner)
    return linear // (2 * heads)


def computing_rank(
    hello: RankHello,
    config: ServeConfig,
    model: ModelConfig,
    duties: Collection[str],
    num_pages: int,
    staging: Staging,
    load: LoadCost = GUESS,
) -> ComputingRank:
    """Build a rank without work.

    num_pages   KV pages of its engine
    staging     its halves and slots
    load        how long it takes to bring blocks into its pages
    """
    turns = 1 if PREFILL in duties else context_size(config, "decode")
    pages, sharing = Pages(num_pages, PAGE_TOKENS), config.prefix_sharing
    if turns > 1:
        pages, sharing = DealtPages(num_pages, PAGE_TOKENS, unit_tokens(config), turns), "off"
    prefix = new_prefix_cache(sharing, pages, config.block_size)
    limits = limits_of(config, model, set(duties) == {PREFILL}, load)
    drafter = new_drafter_of(config, model) if turns == 1 else None
    state = State(
        frozenset(duties), pages, staging, config.block_size, limits, next_key=next_key,
        prefix=prefix, preemption=config.preemption, new_drafter=drafter,
    )  # fmt: skip
    return ComputingRank(hello, state, context_length(config, model))

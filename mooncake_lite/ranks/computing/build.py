"""Builds the machine of a computing rank from a cluster's configuration.

Used by ranks of a cluster, and by `mooncake_lite.llm` for its only rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from mooncake_lite.config.serve import PAGE_TOKENS, ServeConfig
from mooncake_lite.messages import RankHello
from mooncake_lite.model.config import ModelConfig
from mooncake_lite.model.sizes import context_length
from mooncake_lite.ranks.computing.machine import ComputingRank
from scheduler.instance import Limits, Pages, Staging, State, new_prefix_cache
from store.keys import next_key

LEAST_BY_LAYERS = 2
"""Blocks that move by layers with --layerwise auto. One block is as fast as a whole."""


def limits_of(config: ServeConfig, layers: int = 0) -> Limits:
    """Return how much a rank that computes does at once. layers: of the model; 0: nothing moves by layers."""
    return Limits(
        config.max_num_batched_tokens,
        config.max_num_seqs,
        config.max_num_partial_prefills,
        config.enable_chunked_prefill,
        config.overlap_transfers,
        layers if config.overlap_transfers and config.layerwise != "off" else 0,
        LEAST_BY_LAYERS if config.layerwise == "auto" else 1,
    )


def computing_rank(
    hello: RankHello,
    config: ServeConfig,
    model: ModelConfig,
    duties: Iterable[str],
    num_pages: int,
    staging: Staging,
) -> ComputingRank:
    """Build a rank without work. num_pages: KV pages of its engine; staging: its halves and slots."""
    pages = Pages(num_pages, PAGE_TOKENS)
    prefix = new_prefix_cache(config.prefix_sharing, pages, config.block_size)
    limits = limits_of(config, model.layers)
    state = State(
        frozenset(duties), pages, staging, config.block_size, limits, next_key=next_key,
        prefix=prefix, preemption=config.preemption,
    )  # fmt: skip
    return ComputingRank(hello, state, context_length(config, model))

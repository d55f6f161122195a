"""The costs of a cluster, from a profile: what `serve` gives to its conductor, and the simulator to its own.

`scheduler.costs` knows no files. Explained in docs/explain/costs.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.errors import ConfigError
from mooncake_lite.model.config import ModelConfig
from mooncake_lite.model.shares import PIECE_TOKENS
from mooncake_lite.profiles.compute import CHUNK_TOKENS, ComputeCost, PassLoad
from mooncake_lite.profiles.file import ExchangeSection, Profile, profile_of
from scheduler.costs import CostConfig, DecodeCost, LoadCost, PrefillCost, TransferCost


def costs_of(profile: Profile) -> CostConfig:
    """Return the costs that a profile measured. What it lacks is guessed; see CostConfig."""
    compute, moves, guess = profile.compute, profile.moves, CostConfig()
    scale, decode = compute.time_scale, compute.fit.decode
    prefill = profile.prefill.fit if profile.prefill is not None else in_chunks(compute.fit)
    return CostConfig(
        prefill=PrefillCost(
            scale * prefill.base_s, scale * prefill.per_token_s, scale * prefill.per_pair_s,
            scale * prefill.per_cached_token_s, prefill.short_tokens, scale * prefill.short_base_s,
            scale * prefill.short_per_token_s,
        ),
        decode=DecodeCost(scale * decode.base_s, scale * decode.per_token_s, scale * decode.per_key_s),
        transfer=TransferCost(
            (moves and moves.far_bytes_per_s) or guess.transfer.far_bytes_per_s,
            (moves and moves.near_latency_s) or guess.transfer.latency_s,
        ),
        load=LoadCost(
            (moves and moves.dram_bytes_per_s) or guess.load.dram_bytes_per_s,
            (moves and moves.ssd_bytes_per_s) or guess.load.ssd_bytes_per_s,
            guess.load.ssd_latency_s,
        ),
        is_guess=False,
    )  # fmt: skip


PassSeconds = Callable[[PassLoad], float]


def pass_seconds(profile: Profile) -> PassSeconds:
    """Return how long the machines of a profile take for a forward pass.

    Where whole prompts were measured in one pass, passes without a running batch cost what those did: reading
    a cached prefix is a term of theirs.
    """
    compute, prompts = profile.compute, profile.prefill
    if prompts is None or prompts.chunk_tokens:
        return compute.seconds

    def seconds(load: PassLoad) -> float:
        if load.sequences or not load.new_tokens:
            return compute.seconds(load)
        cached = max(0.0, load.pairs / load.new_tokens - (load.new_tokens + 1) / 2)
        return float(prompts.fit.seconds(load.new_tokens + cached, cached)) * compute.time_scale

    return seconds


def seconds_together(
    alone: PassSeconds, exchange: ExchangeSection, layers: int, members: int, turns: int
) -> PassSeconds:
    """Return how long ranks take for a pass that they compute together.

    alone     likewise of one rank
    members   that have some heads each: all work is divided, and they make two sums a layer
    turns     in place of members: that have some tokens' KV each. Attention is divided, and they gather its
              pieces once a layer
    """

    def seconds(load: PassLoad) -> float:
        rows = load.new_tokens + load.sequences
        if turns == 1:
            once_s = 2 * exchange.seconds(rows * exchange.row_bytes, members)
            return alone(load) / members + layers * once_s
        load = replace(load, pairs=load.pairs // turns, context=load.context // turns)
        pieces = (load.pairs + load.context) // PIECE_TOKENS + rows
        return alone(load) + layers * exchange.seconds(pieces * exchange.piece_bytes, turns)

    return seconds


def covered(profile: Profile) -> PassLoad:
    """Return the most of each that a measured pass had: beyond it, costs are extrapolated."""
    loads = [one.load for one in profile.compute.passes]
    names = PassLoad.__struct_fields__
    return PassLoad(*(max((getattr(load, name) for load in loads), default=0) for name in names))


def in_chunks(fit: ComputeCost) -> PrefillCost:
    """Return the cost of whole prompts, from that of passes: a prompt pays a base for each of its chunks."""
    terms = fit.prefill
    return PrefillCost(
        terms.base_s, terms.per_token_s + terms.base_s / CHUNK_TOKENS, terms.per_key_s, 0.0,
        terms.short_tokens, terms.short_base_s, terms.short_per_token_s,
    )  # fmt: skip


def serving_costs(config: ServeConfig, folder: Path, model: ModelConfig) -> CostConfig:
    """Return the costs with which a cluster starts.

    They come from the profile of the configuration. A real engine without one takes the profile that the
    package has for this model, if it was measured on a machine of this name; otherwise the costs are a guess.
    Raises ConfigError when the given profile is of another model, dtype or device.
    """
    try:
        return costs_of(profile_of(config, folder, model))
    except ConfigError:
        if config.profile or config.engine == "emulated":
            raise
        return CostConfig()

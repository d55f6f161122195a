"""Builds the engine of a rank: the real one, or one that computes nothing.

Called by `ranks/assemble.py`. What the real one needs is imported when it is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from mooncake_lite.config.serve import ServeConfig
from mooncake_lite.engine.contract import ComputeEngine
from mooncake_lite.engine.dealing import Dealing
from mooncake_lite.engine.emulated import EmulatedEngine
from mooncake_lite.model.config import ModelConfig
from mooncake_lite.model.exchange import Exchange
from mooncake_lite.model.shares import Share, whole
from mooncake_lite.model.sizes import block_layout, hidden_nbytes, num_pages, unit_tokens
from mooncake_lite.profiles.costs import PassSeconds, seconds_together
from mooncake_lite.profiles.file import profile_of


class Starting(Protocol):
    """Shows what a rank does until it is ready."""

    def compiling(self, done: int, total: int, name: str) -> None:
        """Show which kernel is compiled."""

    def starting(self, what: str) -> None:
        """Show what else is done."""


def build_engine(
    config: ServeConfig,
    folder: Path,
    model_config: ModelConfig,
    threads: int,
    progress: Starting,
    share: Share | None = None,
    exchange: Exchange | None = None,
) -> ComputeEngine:
    """Build the engine that the configuration asks for, of what a rank holds of the model; None: all.

    exchange  between the members of the share's group
    threads   set in the environment before this is called: Numba reads it when it is imported

    Raises ModelError when the folder cannot be used, ConfigError when the profile does not fit the model.
    """
    dealing = None
    if share is not None and share.turns > 1 and exchange is not None:
        dealing = Dealing(share.turn, share.turns, unit_tokens(config), exchange.gather)
    if config.engine == "emulated":
        return emulated_engine(config, folder, model_config, share, dealing)
    from kernels_numba.ahead import compile_ahead, steps_of
    from mooncake_lite.engine.compiling import kernel_use
    from mooncake_lite.engine.engine import Engine
    from mooncake_lite.engine.local import use_threads
    from mooncake_lite.engine.warm import warm_up
    from mooncake_lite.model.forward import load_model

    use_threads(threads)
    use = kernel_use(folder, config.dtype, config.device, config.weights, config.kv_codec)
    if use is not None:
        compile_ahead(steps_of(use), progress.compiling)
    progress.starting("loading the model")
    given = (folder, config.dtype, config.device, config.weights, config.batch_invariant)
    model = load_model(*given, share, exchange if dealing is None else None)
    pages = num_pages(config, model_config, share)
    engine = Engine(model, pages, config.block_size, config.kv_codec, dealing)
    progress.starting("warming up")
    warm_up(engine)
    return engine


def emulated_engine(
    config: ServeConfig,
    folder: Path,
    model_config: ModelConfig,
    share: Share | None = None,
    dealing: Dealing | None = None,
) -> EmulatedEngine:
    """Build an engine that sleeps by its profile. See build_engine."""
    profile, share = profile_of(config, folder, model_config), share or whole(model_config)
    part = share.part_of(model_config)
    seconds: PassSeconds = profile.compute.seconds
    if share.members > 1 or share.turns > 1:
        seconds = seconds_together(seconds, profile.exchange, part.layers, share.members, share.turns)
    return EmulatedEngine(
        block_layout(config, part),
        num_pages(config, model_config, share),
        model_config.vocab_size,
        lambda load: seconds(load) * part.layers / model_config.layers,
        hidden_nbytes=hidden_nbytes(config, model_config),
        dealing=dealing,
        draws=share.member == share.turn == 0,
    )

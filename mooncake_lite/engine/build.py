"""Builds the engine of a rank: the real one, or one that computes nothing.

Called by `roles/assemble.py`. What the real one needs is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_lite.config import ServeConfig
from mooncake_lite.engine.emulated import EmulatedEngine
from mooncake_lite.model.config import ModelConfig
from mooncake_lite.profiles.file import profile_for
from mooncake_lite.sizes import block_layout, num_pages

if TYPE_CHECKING:
    from kernels_numba.ahead import Report
    from mooncake_lite.engine.engine import Engine


def real_engine(
    config: ServeConfig,
    folder: Path,
    model_config: ModelConfig,
    threads: int,
    compiling: Report,
    say: Callable[[str], None],
) -> Engine:
    """Compile the kernels, load the model, and run a tiny request.

    threads     set in the environment before this is called: Numba reads it when it is imported
    compiling   told which kernel is compiled; say: told what else is done

    Raises ModelError when the folder cannot be used.
    """
    from kernels_numba.ahead import compile_ahead, steps_of
    from mooncake_lite.engine.compiling import kernel_use
    from mooncake_lite.engine.engine import Engine
    from mooncake_lite.engine.local import use_threads
    from mooncake_lite.engine.warm import warm_up
    from mooncake_lite.model.forward import load_model

    use_threads(threads)
    use = kernel_use(folder, config.dtype, config.device, config.weights, config.kv_codec)
    if use is not None:
        compile_ahead(steps_of(use), compiling)
    say("loading the model")
    model = load_model(folder, config.dtype, config.device, config.weights, config.batch_invariant)
    engine = Engine(model, num_pages(config, model_config), config.block_size, config.kv_codec)
    say("warming up")
    warm_up(engine)
    return engine


def emulated_engine(config: ServeConfig, folder: Path, model_config: ModelConfig) -> EmulatedEngine:
    """Read the profile. Raises ConfigError when it does not fit the model."""
    profile = profile_for(config.profile, folder, model_config, config.dtype)
    layout, pages = block_layout(config, model_config), num_pages(config, model_config)
    return EmulatedEngine(layout, pages, model_config.vocab_size, profile.compute.seconds)

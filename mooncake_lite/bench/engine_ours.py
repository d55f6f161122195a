"""Our engine in this process, as `mooncake-lite generate` runs it, with the times of its tokens.

Used by the `engine_*` benchmarks.
"""

from __future__ import annotations

import time
from pathlib import Path

from mooncake_lite.bench.engine_sides import Prompts
from mooncake_lite.engine.compiling import compile_with_helpers, console_compiling, kernel_use
from mooncake_lite.engine.local import generate_all, use_threads
from mooncake_lite.launch.machine import usable_cores
from mooncake_lite.messages import Sampling
from mooncake_lite.model import Model, load_model
from scheduler.instance import Limits

PASS = Limits(tokens=2048, prefills=16)
"""Of one forward pass. The peers compute a whole prompt in one pass, or in passes of 512 tokens."""


class Ours:
    """The model of a folder, loaded: blocks as published for a few tokens, where the folder has them."""

    def __init__(self, folder: Path, threads: int) -> None:
        use_threads(threads)
        if use := kernel_use(folder, "float32", "cpu", "auto"):
            with console_compiling() as report:
                compile_with_helpers(use, report, helpers=usable_cores() - 1)
        self.model: Model = load_model(folder)

    def token_times(self, prompts: Prompts, new: int, limits: Limits = PASS) -> list[list[float]]:
        """Answer greedily; return when each token came, in seconds since the start, for each prompt."""
        times: list[list[float]] = [[] for _ in prompts]
        began = time.perf_counter()
        for number, _ in generate_all(self.model, prompts, Sampling(0.0), new, frozenset(), limits):
            times[number].append(time.perf_counter() - began)
        return times

    def answer(self, prompts: Prompts, new: int) -> float:
        """Answer greedily; return the seconds."""
        return max(times[-1] for times in self.token_times(prompts, new))

"""Measures what serving takes besides forward passes and moves of KV, on ranks that sleep.

Called by `mooncake-lite profile`, and by `bench simulator`. Explained in docs/explain/simulator.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from statistics import median

from mooncake_lite.errors import ClusterError
from mooncake_lite.model.config import load_config
from mooncake_lite.profiles.compute import ComputeCost, PassLoad, PassTerms
from mooncake_lite.profiles.file import (
    ComputeSection,
    EngineUsed,
    OverheadsSection,
    Profile,
    new_profile,
)
from mooncake_lite.profiles.fit import MeasuredPass
from mooncake_lite.tools.bench.cluster import FOUR_RANKS, Ask, Reply, answers, started

COST = ComputeCost(prefill=PassTerms(0.005, 4e-4, 8e-8), decode=PassTerms(0.025, 3e-4, 0.0))
"""Of ranks that sleep. A prompt of 752 tokens, the mean of the public trace over 16, takes 0.33 s. Steps of
25 ms leave two cores time for all the processes."""

BEYOND = PassLoad(1 << 20, 1 << 40, 1 << 10, 1 << 30)
"""More than any pass. Sleeping ranks take what the cost says, whatever they are told to compute."""

ASKS, PROMPT_TOKENS, ANSWER_TOKENS = 15, 32, 12
"""Requests one at a time, from which overheads follow."""

LEAST_S = 1e-5


def measure_overheads(folder: Path, tell: Callable[[str], None]) -> OverheadsSection | None:
    """Measure on a small cluster. tell: is told why there is no result, where there is none."""
    try:
        flags = [str(folder), *FOUR_RANKS, "--engine", "emulated"]
        with started(flags, sleeping_profile(folder)) as cluster:
            return overheads_of(cluster.port, load_config(folder).vocab_size)
    except ClusterError as error:
        tell(f"overheads are not measured: {error}")
        return None


def sleeping_profile(folder: Path) -> Profile:
    """Return the profile of ranks that sleep, for a model."""
    covers = [MeasuredPass(BEYOND, COST.seconds(BEYOND))]
    compute = ComputeSection(EngineUsed("float32", "cpu", "auto", 1), COST, {}, covers)
    return new_profile(folder.name, load_config(folder), "float32", {}).with_section("compute", compute)


def overheads_of(port: int, vocab_size: int) -> OverheadsSection:
    """Measure on a cluster of sleeping ranks, with requests one at a time, whose passes are known.

    A first token comes after the gateway, two messages, a pass and a step's overhead. The second one comes
    after two messages and a step more, and later ones after a step each. Raises ClusterError.
    """
    dice, replies = random.Random(1), list[Reply]()
    for _ in range(ASKS):
        prompt = dice.choices(range(vocab_size // 8, vocab_size), k=PROMPT_TOKENS)
        replies += answers(port, [Ask(0.0, prompt, ANSWER_TOKENS)])
    prompt_s = COST.seconds(PassLoad(PROMPT_TOKENS, PROMPT_TOKENS * (PROMPT_TOKENS + 1) // 2))
    gap_s = median(b - a for reply in replies for a, b in zip(reply.times[1:-1], reply.times[2:-1]))
    second_s = median(reply.times[1] - reply.times[0] for reply in replies)
    first_s = median(reply.ttft_s for reply in replies)
    step_s = max(LEAST_S, gap_s - COST.seconds(PassLoad(0, 0, 1, PROMPT_TOKENS)))
    message_s = max(LEAST_S, (second_s - gap_s) / 2)
    return OverheadsSection(step_s, message_s, max(LEAST_S, first_s - prompt_s - step_s - 2 * message_s))

"""What a run of the world is about: the cluster, its machines, its requests, and what goes wrong.

Made by tests, with a seed that draws everything, and by `cluster.py`, where all of it is given. Explained
in docs/explain/control.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import msgspec

from mooncake_lite.simulator.clock import Clock
from mooncake_lite.simulator.faults import Faults
from mooncake_lite.simulator.hardware import DrawnHardware, Hardware
from mooncake_lite.simulator.poison import Poison
from mooncake_lite.simulator.shapes import Shape
from mooncake_lite.simulator.workload import Source, Workload

GAPS_S = (0.1, 0.4, 0.8, 2.0)
"""Mean times between requests, for each prompt that the cluster computes at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One run.

    seed          is named when the run fails
    hardware      makes the hardware of the run, which needs its clock
    exact         tokens, KV and the ranges of the pool are followed; otherwise prompts are lengths
    source        of its requests
    dice          decides about faults, client_dice about what clients do
    """

    seed: int
    shape: Shape
    faults: Faults
    hardware: Callable[[Clock], Hardware]
    source: Source
    dice: Random
    client_dice: Random
    exact: bool = True

    @classmethod
    def drawn(cls, seed: int, num_requests: int = 100, faults: Faults | None = None) -> Setting:
        """Draw everything. faults: how often things go wrong where they do; None: often."""
        random = Random(seed)
        shape = Shape.drawn(random)
        drawn = (faults or Faults()).drawn(random)
        shape = replace(shape, config=msgspec.structs.replace(shape.config, verify=drawn.flipped > 0))
        dice, of_requests, client_dice = (Random(random.getrandbits(64)) for _ in range(3))
        gap_s = client_dice.choice(GAPS_S) / shape.at_once
        size = shape.layout.block_tokens
        apart = Random(f"poison {seed}")  # so that all else is drawn as without poison
        poison = partial(Poison.drawn, apart, "stage" not in shape.config.roles)
        return cls(
            seed=seed,
            shape=shape,
            faults=drawn,
            hardware=lambda clock: DrawnHardware(clock, dice),
            source=Workload(
                of_requests, num_requests, gap_s, size, shape.largest_blocks * size,
                too_large=shape.config.handover != "none",
                poison=poison if apart.random() < drawn.poisoned else None,
            ),
            dice=dice,
            client_dice=client_dice,
        )  # fmt: skip

"""Experiments: the live control plane on modelled machines, with requests at a given rate.

Used by `compare_policies.py` and `compare_admission.py`. Nothing goes wrong in these runs. Explained in
docs/explain/experiments.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from random import Random

import numpy as np

from mooncake_lite.control import ControlConfig
from mooncake_lite.profiles.compute import PassLoad
from mooncake_lite.simulator.computing_rank import SimulatedRank
from mooncake_lite.simulator.faults import Faults
from mooncake_lite.simulator.outcome import Loads, Outcome
from mooncake_lite.simulator.profiled import ProfiledHardware
from mooncake_lite.simulator.sessions import SessionMix, Sessions
from mooncake_lite.simulator.setting import Setting
from mooncake_lite.simulator.shapes import Shape
from mooncake_lite.simulator.workload import Source, mixed
from mooncake_lite.simulator.world import World
from scheduler.classes import ServiceClass
from scheduler.costs import CostConfig
from scheduler.instance import DECODE

LLAMA3_70B = (80, 8, 512, 128, 2, "none")
"""Layout of a block of the paper's model in bfloat16: 512 tokens, 160 MiB."""

RANK_BLOCKS = 2_048
"""Blocks that the pages of a rank hold: 320 GiB, what 8 GPUs of 80 GB have beside the weights, rounded."""

NEVER = 10**9
"""Events between two checks of all invariants, more than a run has: the fault runs check them."""

WARM_UP = 0.25
"""Share of a run's requests, the first ones, that do not count."""

SAMPLE_S = 1.0
"""Time between two samples of the loads."""

MOST_RATE = 1e5
"""Requests per second, beyond which no capacity is searched: all requests of a run come at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One cluster under one load.

    seconds      how long its machines take for a forward pass, as the emulated engine has it
    costs        with which the control plane starts; transfers take as long as they say
    prefills     nodes with a prefill rank and a store rank
    decodes      nodes with a decode rank
    node_blocks  blocks of 512 tokens that a store rank lends: 1 TB of a node's DRAM holds some 6,000
    ttft_s, tbt_s   limits that goodput counts
    margin       factor on these limits for admission, so that a small error makes no request late
    rate         requests per second, in the mean
    """

    seconds: Callable[[PassLoad], float]
    costs: CostConfig
    prefills: int
    decodes: int
    node_blocks: int = 6_000
    policy: str = "kvcache-centric"
    admission: str = "none"
    ttft_s: float = 30.0
    tbt_s: float = 0.2
    margin: float = 0.9
    rate: float = 1.0
    requests: int = 1_000
    mix: SessionMix = field(default_factory=SessionMix)

    def run(self, seed: int) -> Outcome:
        """Play all requests of a seed until they have ended."""
        size = LLAMA3_70B[2]
        return self.play(Sessions(seed, self.requests, self.rate, self.mix, size), seed)

    def play(self, source: Source, seed: int = 0) -> Outcome:
        """Play the requests of a source until they have ended."""
        roles = [
            "steward",
            *["prefill"] * self.prefills,
            *["store"] * self.prefills,
            *["decode"] * self.decodes,
        ]
        first = list(range(self.prefills))
        nodes = [0, *first, *first, *range(self.prefills, self.prefills + self.decodes)]
        shape = Shape(
            config=self._config(roles, nodes),
            segments=[self.node_blocks * (role == "store") for role in roles],
            slots=self.requests, prompts=1, pages=RANK_BLOCKS, page_tokens=LLAMA3_70B[2], budget=1 << 30,
            chunked=False, half_blocks=RANK_BLOCKS,
        )  # fmt: skip
        setting = Setting(
            seed=seed, shape=shape, faults=Faults.none(),
            hardware=lambda clock: ProfiledHardware(clock, self.seconds, self.costs, nodes),
            source=source,
            dice=Random(mixed(seed, 5)), client_dice=Random(mixed(seed, 6)), exact=False,
        )  # fmt: skip
        return _played(setting, self.ttft_s, self.tbt_s)

    def _config(self, roles: list[str], nodes: list[int]) -> ControlConfig:
        limited = self.admission != "none"
        service = ServiceClass(name="standard")
        if limited:
            service = ServiceClass(
                name="standard", slo_ttft_s=self.margin * self.ttft_s, slo_tbt_s=self.margin * self.tbt_s
            )
        return ControlConfig(
            layout=LLAMA3_70B, roles=roles, nodes=nodes, max_queue=self.requests, policy=self.policy,
            admission=self.admission, costs=self.costs, classes=[service],
        )  # fmt: skip


def _played(setting: Setting, ttft_s: float, tbt_s: float) -> Outcome:
    """Run a world, and sample its loads every SAMPLE_S."""
    loads = Loads()
    world = World(setting, check_every=NEVER, patience_s=inf)
    decodes = [
        rank for rank in world.ranks.values()
        if isinstance(rank, SimulatedRank) and DECODE in rank.rank.state.duties
    ]  # fmt: skip

    def sample() -> None:
        now = world.clock.now
        if world.ready:
            loads.times_s.append(now)
            loads.prefill.append(float(np.mean(world.control.state.queue_s(now))) / ttft_s)
            loads.decode.append(float(np.mean([one.step_s for one in decodes])) / tbt_s)
        if not world.clients.done:
            world.clock.after(SAMPLE_S, sample)

    world.clock.after(0.0, sample)
    world.run()
    return Outcome.of(world.requests.values(), loads, WARM_UP)


def capacity(
    experiment: Experiment, seed: int, share: float, told: Callable[[], None], steps: int = 7
) -> float:
    """Search for the highest rate, in requests per second, at which this share of requests meets both limits.

    The search doubles the rate of the experiment while that holds, up to MOST_RATE, and then bisects. It
    returns 0 when no rate that it tried holds.

    told    is called after each run
    steps   bisections
    """

    def holds(rate: float) -> bool:
        outcome = replace(experiment, rate=rate).run(seed)
        told()
        return outcome.share_within(experiment.ttft_s, experiment.tbt_s) >= share

    low, high = 0.0, experiment.rate
    while high < MOST_RATE and holds(high):
        low, high = high, 2 * high
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

"""What the control plane costs per request: its arrival alone, and its whole life, among many instances.

Run by `bench scheduler`. No socket and no rank is involved: events in, effects out. The limit of an arrival
is what any prefix index in Python has to do, one dictionary access for each key.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Sequence

from mooncake_lite.bench import scheduler_decisions, scheduler_index
from mooncake_lite.bench.result import Other, Row
from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev

INSTANCES = 64
"""Prefill instances, and as many decode instances and store ranks, one of each per node."""

LLM_D = Other("llm-d's learned latency predictor, a sidecar on 192 vCPUs, homogeneous pools only", 300.0)
"""Published, in requests/s."""

SUMS = [1, 2]
LAYOUT = (2, 1, 64, 8, 4, "none")
BLOCK_TOKENS = LAYOUT[2]


def run(quick: bool) -> list[Row]:
    """Measure decisions; whole requests of 24 and of 250 blocks, half of which the pool knows; the index."""
    requests = 100 if quick else 400
    rows = scheduler_decisions.run(quick)
    for blocks in (24, 250):
        rows += measure(blocks, requests)
    return rows + scheduler_index.run(quick)


def measure(blocks: int, requests: int) -> list[Row]:
    """Lives first, then arrivals while every prefill slot is taken: these decide, and start nothing."""
    random_ = random.Random(0)
    prompts = [[random_.getrandbits(63) for _ in range(blocks)] for _ in range(requests)]
    plane = Plane(blocks * (requests * 3 + INSTANCES))
    for number, keys in enumerate(prompts):
        plane.live(f"first-{number}", keys)
    gc.collect()
    gc.freeze()
    half = blocks // 2
    again = [keys[:half] + [random_.getrandbits(63) for _ in range(blocks - half)] for keys in prompts]
    lives = [plane.live(f"second-{number}", keys) for number, keys in enumerate(again)]
    for number in range(INSTANCES):
        plane.arrive(f"busy-{number}", [])
    arrivals = [plane.arrive(f"third-{number}", keys)[0] for number, keys in enumerate(again)]
    gc.unfreeze()
    accesses = Other("one dictionary access for each key", access_s(again) * 1e6)
    shape = f"{blocks} blocks, {INSTANCES} + {INSTANCES} instances"
    arrival_s = statistics.median(arrivals)
    return [
        Row(f"arrival, {shape}", "us", arrival_s * 1e6, None, accesses, requests),
        Row(f"arrivals, {shape}", "requests/s", 1 / arrival_s, None, None, requests, published=(LLM_D,)),
        Row(f"whole life, {shape}", "lives/s", 1 / statistics.median(lives), None, None, requests),
    ]


def access_s(prompts: Sequence[Sequence[int]]) -> float:
    """Seconds for one dictionary access for each key of a prompt, in the median."""
    known = {key: 1 for keys in prompts for key in keys}
    taken = []
    for keys in prompts:
        began = time.perf_counter()
        for key in keys:
            known.get(key)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


class Plane:
    """A control plane with many instances, and ranks that answer at once.

    pool_blocks   blocks that the pool can hold
    """

    def __init__(self, pool_blocks: int) -> None:
        each = INSTANCES
        roles = ["conductor", *["prefill"] * each, *["decode"] * each, *["store"] * each]
        nodes = [0, *[rank % each for rank in range(3 * each)]]
        config = ControlConfig(layout=LAYOUT, roles=roles, nodes=nodes, max_queue=10**6)
        self._control = Control(config)
        self._now = 0.0
        segment = (pool_blocks // each + 1) * config.block_layout.nbytes
        for rank, role in enumerate(roles[1:], 1):
            slots = {"prefill": 1, "decode": 10**6, "store": 0}[role]
            lent = segment if role == "store" else 0
            self._on(ev.RankJoined(rank, 0, rank, (role,), nodes[rank], slots=slots, segment_bytes=lent))
        self._on(ev.GatewayReady("gateway"))

    def _on(self, event: ev.Event) -> list[fx.Effect]:
        self._now += 1e-4
        return self._control.on(event, self._now)

    def arrive(self, name: str, keys: list[int]) -> tuple[float, list[fx.Effect]]:
        """Seconds that an arrival takes, and its effects. The prompt ends with a partial block."""
        arrived = ev.RequestArrived(name, len(keys) * BLOCK_TOKENS + 10, 16, keys, keys)
        began = time.perf_counter()
        effects = self._on(arrived)
        return time.perf_counter() - began, effects

    def live(self, name: str, keys: list[int]) -> float:
        """Seconds of a request from its arrival to its end, on idle instances."""
        seconds, effects = self.arrive(name, keys)
        (job,) = [effect for effect in effects if isinstance(effect, fx.StartPrefill)]
        began = time.perf_counter()
        sums = [SUMS] * len(job.store)
        effects = self._on(ev.PrefillEnded(job.rank, 0, name, job.attempt, sums, [], 0.0, 0.1, 0.0))
        (order,) = [effect for effect in effects if isinstance(effect, fx.StartDecode)]
        self._on(ev.DecodeLoaded(order.rank, 0, name, order.attempt))
        self._on(ev.DecodeEnded(order.rank, 0, name, order.attempt))
        return seconds + time.perf_counter() - began

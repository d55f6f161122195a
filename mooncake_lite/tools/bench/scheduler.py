"""The control plane: what a decision costs, an arrival alone, and a whole request, among many instances.

Run by `bench.command`; the prefix index is in `scheduler_index`. No socket and no rank is involved: events
in, effects out. The limit of an arrival is what any prefix index in Python has to do, one dictionary access
for each key.

A decision is a place for a request, and whether it is admitted. The policy is KVCache-centric and admission
predicts the decode load. Instances are busy, and the pool knows a part of every prompt. The limit of its 99th
percentile is that of a plain loop which takes as long as the median decision: a machine that interrupts its
programs delays one in a hundred of both.
"""

from __future__ import annotations

import gc
import random
import statistics
import time

from mooncake_lite.control import Control, ControlConfig
from mooncake_lite.control import effects as fx
from mooncake_lite.control import events as ev
from mooncake_lite.tools.bench import scheduler_index
from mooncake_lite.tools.bench.result import Other, Row, timed
from mooncake_lite.tools.bench.scheduler_index import accesses, settle
from scheduler import ADMISSIONS, CostConfig, Costs, Placement, Request, State, choose
from scheduler.placement import POLICIES

INSTANCES = 64
"""Prefill instances, and as many decode instances and store ranks, one of each per node."""

LLM_D = Other("llm-d's learned latency predictor, a sidecar on 192 vCPUs, homogeneous pools only", 300.0)
"""Published, in requests/s."""

SUMS = [1, 2]
BLOCK_TOKENS = 64
LAYOUT = (2, 1, BLOCK_TOKENS, 8, 4, "none")

BLOCKS = 250
"""Of a prompt about which a decision is made."""

BLOCK_NBYTES = 1 << 20
NOW_S = 100.0


def run(quick: bool) -> list[Row]:
    """Measure decisions; whole requests of 24 and of 250 blocks, half of which the pool knows; the index.

    Decisions are made among 64 and among 512 instances of each duty, with an index of a million blocks.
    """
    prompts, count = (400, 200) if quick else (4000, 2000)
    rows = [row for instances in (64, 512) for row in decisions(instances, prompts, count)]
    rows += [row for blocks in (24, 250) for row in requests(blocks, 100 if quick else 400)]
    return rows + scheduler_index.run(quick)


def some_keys(random_: random.Random, count: int) -> list[int]:
    """Draw keys of blocks."""
    return [random_.getrandbits(63) for _ in range(count)]


def decisions(instances: int, prompts: int, count: int) -> list[Row]:
    """Measure decisions about prompts whose first part the pool knows."""
    random_ = random.Random(1)
    known = [some_keys(random_, BLOCKS) for _ in range(prompts)]
    state = busy_cluster(instances, known, random_)
    policy, admission = POLICIES["kvcache-centric"](), ADMISSIONS["predictive"]()
    asked = [_request(f"r{number}", random_.choice(known), random_) for number in range(count)]
    settle()
    taken = []
    for request in asked:
        began = time.perf_counter()
        admission.on_arrival(state, request, NOW_S)
        found = choose(policy, state, request, NOW_S)
        assert isinstance(found, Placement)
        admission.on_place(state, request, found, NOW_S)
        taken.append(time.perf_counter() - began)
    median_s, late_s = statistics.median(taken), late(taken)
    longest = "99th percentile of a loop as long as the median decision"
    loop = Other(longest, late(loop_times(median_s, count)) * 1e6)
    walk = accesses([[*request.keys] for request in asked])
    gc.unfreeze()
    shape = f"{instances} + {instances} instances, {BLOCKS} blocks, index of {prompts * BLOCKS:,}"
    return [
        Row(f"decision, median, {shape}", "us", median_s * 1e6, None, walk, count),
        Row(f"decision, 99th percentile, {shape}", "us", late_s * 1e6, None, loop, count),
    ]


def late(taken: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(taken, n=100)[98]


def loop_times(median_s: float, runs: int) -> list[float]:
    """Return the seconds of each run of a loop that touches no memory and has this median."""
    sample = timed(lambda: sum(range(1000)))
    steps = round(1000 * median_s / statistics.median(sample() for _ in range(200)))
    loop = timed(lambda: sum(range(steps)))
    return [loop() for _ in range(runs)]


def busy_cluster(instances: int, prompts: list[list[int]], random_: random.Random) -> State:
    """Make a cluster of one prefill instance, decode instance and part of the pool per node, all at work.

    Every prompt is on one node, and a part of it on another one.
    """
    state = State(10**6, Costs(CostConfig(is_guess=False)), block_nbytes=BLOCK_NBYTES)
    for node in range(instances):
        state.add_instance(1 + node, node, ["prefill"], 1)
        state.index.add_holder(10_000 + node, node)
    for node in range(instances):
        state.add_instance(20_000 + node, node, ["decode"], 1000)
    for keys in prompts:
        for part in ([*keys], keys[: random_.randrange(BLOCKS)]):
            state.index.stored_run(part, 0, 10_000 + random_.randrange(instances), "dram")
    policy = POLICIES["two-choices"]()
    for number in range(4 * instances):
        request = _request(f"busy-{number}", random_.choice(prompts), random_)
        found = choose(policy, state, request, 0.0)
        assert isinstance(found, Placement)
        state.place(request, found, 0.0)
    while (name := state.startable()) is not None:
        state.start(name, 0.0)
    return state


def _request(name: str, keys: list[int], random_: random.Random) -> Request:
    """Ask with the first part of a known prompt, and new blocks after it."""
    half = random_.randrange(BLOCKS)
    own = keys[:half] + some_keys(random_, BLOCKS - half)
    tokens = BLOCKS * BLOCK_TOKENS + 10
    return Request(name, tokens, own, BLOCK_TOKENS, 256, slo_ttft_s=1e6, slo_tbt_s=1e6, predicted_tokens=128)


def requests(blocks: int, count: int) -> list[Row]:
    """Lives first, then arrivals while every prefill slot is taken: these decide, and start nothing."""
    random_ = random.Random(0)
    prompts = [some_keys(random_, blocks) for _ in range(count)]
    plane = Plane(blocks * (count * 3 + INSTANCES))
    for number, keys in enumerate(prompts):
        plane.live(f"first-{number}", keys)
    settle()
    half = blocks // 2
    again = [keys[:half] + some_keys(random_, blocks - half) for keys in prompts]
    lives = [plane.live(f"second-{number}", keys) for number, keys in enumerate(again)]
    for number in range(INSTANCES):
        plane.arrive(f"busy-{number}", [])
    arrivals = [plane.arrive(f"third-{number}", keys)[0] for number, keys in enumerate(again)]
    limit = accesses(again)
    gc.unfreeze()
    shape = f"{blocks} blocks, {INSTANCES} + {INSTANCES} instances"
    arrival_s = statistics.median(arrivals)
    return [
        Row(f"arrival, {shape}", "us", arrival_s * 1e6, None, limit, count),
        Row(f"arrivals, {shape}", "requests/s", 1 / arrival_s, None, None, count, published=(LLM_D,)),
        Row(f"whole life, {shape}", "lives/s", 1 / statistics.median(lives), None, None, count),
    ]


class Plane:
    """A control plane with many instances, and ranks that answer at once.

    pool_blocks   blocks that the pool can hold
    """

    def __init__(self, pool_blocks: int) -> None:
        each = INSTANCES
        roles = ["steward", *["prefill"] * each, *["decode"] * each, *["store"] * each]
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

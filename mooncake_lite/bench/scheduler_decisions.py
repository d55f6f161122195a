"""What one decision of the Conductor costs: a place for a request, and whether it is admitted.

Run by `bench scheduler`. The policy is KVCache-centric and admission predicts the decode load. Instances are
busy, and the pool knows a part of every prompt. Nothing but `scheduler` is involved.

The limit of a 99th percentile is that of a plain loop which takes as long as the median decision: a machine
that interrupts its programs delays one in a hundred of both.
"""

from __future__ import annotations

import gc
import random
import statistics
import time

from mooncake_lite.bench.result import Other, Row
from scheduler import ADMISSIONS, CostConfig, Costs, Placement, Request, State, choose
from scheduler.placement import POLICIES

BLOCKS = 250
BLOCK_TOKENS = 64
BLOCK_NBYTES = 1 << 20
NOW_S = 100.0

LOOP = "99th percentile of a loop as long as the median decision"


def run(quick: bool) -> list[Row]:
    """Measure among 64 and among 512 instances of each duty, with an index of a million blocks."""
    prompts, decisions = (400, 200) if quick else (4000, 2000)
    return [row for instances in (64, 512) for row in measure(instances, prompts, decisions)]


def measure(instances: int, prompts: int, decisions: int) -> list[Row]:
    """Measure decisions about prompts whose first part the pool knows."""
    random_ = random.Random(1)
    known = [[random_.getrandbits(63) for _ in range(BLOCKS)] for _ in range(prompts)]
    state = busy_cluster(instances, known, random_)
    policy, admission = POLICIES["kvcache-centric"](), ADMISSIONS["predictive"]()
    requests = [_request(f"r{number}", random_.choice(known), random_) for number in range(decisions)]
    gc.collect()
    gc.freeze()
    taken = []
    for request in requests:
        began = time.perf_counter()
        admission.on_arrival(state, request, NOW_S)
        found = choose(policy, state, request, NOW_S)
        assert isinstance(found, Placement)
        admission.on_place(state, request, found, NOW_S)
        taken.append(time.perf_counter() - began)
    median_s, late_s = statistics.median(taken), late(taken)
    loop = Other(LOOP, late(loop_times(median_s, decisions)) * 1e6)
    gc.unfreeze()
    walk = Other("one dictionary access for each key", _access_s(requests) * 1e6)
    shape = f"{instances} + {instances} instances, {BLOCKS} blocks, index of {prompts * BLOCKS:,}"
    return [
        Row(f"decision, median, {shape}", "us", median_s * 1e6, None, walk, decisions),
        Row(f"decision, 99th percentile, {shape}", "us", late_s * 1e6, None, loop, decisions),
    ]


def late(taken: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(taken, n=100)[98]


def loop_times(median_s: float, runs: int) -> list[float]:
    """Return the seconds of each run of a loop that touches no memory and has this median."""
    steps = 1000
    steps = round(steps * median_s / statistics.median(_timed_sum(steps) for _ in range(200)))
    return [_timed_sum(steps) for _ in range(runs)]


def _timed_sum(steps: int) -> float:
    began = time.perf_counter()
    sum(range(steps))
    return time.perf_counter() - began


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
        state.index.stored_run([*keys], 0, 10_000 + random_.randrange(instances), "dram")
        state.index.stored_run(
            keys[: random_.randrange(BLOCKS)], 0, 10_000 + random_.randrange(instances), "dram"
        )
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
    own = keys[:half] + [random_.getrandbits(63) for _ in range(BLOCKS - half)]
    tokens = BLOCKS * BLOCK_TOKENS + 10
    return Request(name, tokens, own, BLOCK_TOKENS, 256, slo_ttft_s=1e6, slo_tbt_s=1e6, predicted_tokens=128)


def _access_s(requests: list[Request]) -> float:
    """Seconds of one dictionary access for each key of a prompt, in the median."""
    known = {key: 1 for request in requests for key in request.keys}
    taken = []
    for request in requests:
        began = time.perf_counter()
        for key in request.keys:
            known.get(key)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
